"""Mutants of how ranks start, meet and end, and run.sh."""

from mutants_base import LOST_NODE, SEVERAL, WINS, mutant

# One fault takes two or three lines here, and not seven.
# fmt: off

# ----------------------------------------------------------------------------------------------------------------------------------- run.sh

HALF_MADE = "test_half_made_environment_is_made_anew"
mutant("run.sh: code of the current folder", "run.sh", "python3 -I -c", "python3 -c", "test_bad_command_line_ends_with_code_2_and_one_line[run.sh fdsp 2-]")
mutant("run.sh: any environment that has Python is whole", "run.sh",
       """! in_here -c 'import importlib.metadata as m; raise SystemExit(not m.files("pip"))' 2>/dev/null""",
       "[[ ! -x $python ]]", HALF_MADE)
mutant("run.sh: an environment that has half of pip is whole", "run.sh", 'not m.files("pip")', 'not m.version("pip")', HALF_MADE)
mutant("run.sh: what is half-made is kept", "run.sh", "-m venv --clear", "-m venv", HALF_MADE)
mutant("run.sh: a whole environment is made anew too", "run.sh", 'raise SystemExit(not m.files("pip"))', "raise SystemExit(1)", HALF_MADE)
NO_ENSUREPIP = "test_python_without_ensurepip_is_told_what_to_install"
mutant("run.sh: goes on without ensurepip", "run.sh", "'import ensurepip, venv' 2>/dev/null", "'import venv' 2>/dev/null", NO_ENSUREPIP)
mutant("run.sh: a link is taken for the project", "run.sh", 'readlink -f -- "', 'realpath -s -- "',
       "test_link_to_run_sh_uses_the_folder_of_the_project")
SHIM = "test_python_that_a_shim_picks_in_the_users_folder_is_used_for_everything"
mutant("run.sh: a shim is asked again and again", "run.sh", """python=$("$found" -I -c 'import sys; print(sys.executable)')""",
       "python=$found", SHIM)
mutant("run.sh: a shim is asked in the project", "run.sh", 'python=$("$found"', 'python=$(cd -- "$here" && "$found"', SHIM)
DEFAULT = "test_script_decides_how_many_devices_if_n_is_not_given"
NUMBER = "test_number_of_devices_is_n_or_the_option_or_the_default"
mutant("run.sh: dp without N has two replicas", "run.sh", '${devices:+--replicas "$devices"}', '--replicas "${devices:-2}"', DEFAULT)
mutant("run.sh: spawn without N has two processes", "run.sh", '${devices:+--nproc "$devices"}', '--nproc "${devices:-2}"', DEFAULT)
mutant("run.sh: spawn forgets N", "run.sh", '${devices:+--nproc "$devices"}', "", NUMBER)
KEPT = "test_memory_of_the_gradients_is_kept_from_step_to_step"
mutant("memory: what is freed goes back to the system", "run.sh", "MALLOC_TRIM_THRESHOLD_=${MALLOC_TRIM_THRESHOLD_:-1073741824}",
       "MALLOC_TRIM_THRESHOLD_=131072", KEPT)
mutant("memory: the large gradients are mapped anew in every step", "run.sh", "MALLOC_MMAP_MAX_=${MALLOC_MMAP_MAX_:-0}",
       "MALLOC_MMAP_MAX_=65536 MALLOC_MMAP_THRESHOLD_=33554432", KEPT)

# ---------------------------------------------------------------------------------------------------------------------- machinery/launch.py

mutant("launch: spawned ranks outlive the launcher", "machinery/launch",
       "    end_with_parent(signal.SIGKILL)\n    if not mp.parent_process().is_alive():", "    if not mp.parent_process().is_alive():",
       "test_ranks_that_wait_before_training_end_with_the_launcher[spawn]")
mutant("launch: a Python that starts meets Ctrl-C", "machinery/launch",
       '    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)\n    os.environ["LAUNCH_PID"]',
       '    os.environ["LAUNCH_PID"]',
       "test_ctrl_c_while_ranks_start_is_answered_without_a_traceback[spawn-kill]")
BLAME = "test_end_of_a_run_is_told_by_the_rank_that_is_to_blame"
mutant("launch: a signal before training is a failure", "machinery/launch", "if number in received:", "if False:", BLAME)
mutant("launch: a failed rank is success", "machinery/launch", 'return int(bool(failed)), ""', 'return 0, ""', BLAME)
mutant("launch: nobody says with which code a rank left", "machinery/launch", "if untold := [rank", "if untold := [] and [rank", BLAME)
mutant("launch: what a rank has told is told again", "machinery/launch", "if code not in (None, 0, FAILED, LOST)]", "if code not in (None, 0, LOST)]", BLAME)
mutant("launch: ranks that hang are waited for", "machinery/launch", "            process.kill()\n", "", BLAME)
mutant("launch: the others have no time after a failure", "machinery/launch",
       "min(deadline, time.monotonic() + GRACE)", "time.monotonic()", BLAME)
mutant("launch: divergence is no end on purpose", "machinery/launch", "{2, 3, 130, 143}", "{2, 130, 143}", BLAME)
mutant("launch: SIGTERM and its saving is no end on purpose", "machinery/launch", "{2, 3, 130, 143}", "{2, 3, 130}", BLAME)
mutant("launch: any signal was asked for", "machinery/launch", "if number in received:", "if received or number in SIGNALS:", BLAME)
mutant("launch: a rank that starts meets Ctrl-C", "machinery/launch",
       "    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)\n    processes = []", "    processes = []",
       "test_ctrl_c_while_ranks_start_is_answered_without_a_traceback[ddp-kill]")
mutant("launch: which signals came is forgotten", "machinery/launch", "        received.append(number)\n", "",
       "test_ctrl_c_while_ranks_start_is_answered_without_a_traceback[spawn-kill]")
mutant("launch: signals stay blocked in the launcher", "machinery/launch", "    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)\n", "",
       "test_pitfall_39_nothing_outlives_the_launcher[SIGINT]")
mutant("launch: the launcher of spawned ranks ends well", "machinery/launch",
       "[])\n    tell(cause)\n    return code", "[])\n    tell(cause)\n    return 0",
       "test_pitfall_06_dead_rank_ends_the_job[raises]")
mutant("launch: the launcher of spawned ranks does not tell the cause", "machinery/launch",
       "[])\n    tell(cause)\n", "[])\n", "test_pitfall_06_dead_rank_ends_the_job[is killed]")
mutant("launch: spawned ranks take themselves for torchrun's", "machinery/launch",
       'SIGNALS)\n    os.environ["LAUNCH_PID"] = str(os.getpid())\n', "SIGNALS)\n", "test_pitfall_06_dead_rank_ends_the_job[raises]")
mutant("launch: spawned ranks of one machine listen to all", "machinery/launch",
       "            stay_on_this_machine()\n            yield", "            yield",
       "test_ranks_that_wait_before_training_end_with_the_launcher[spawn]")
RESTARTS = "test_launcher_restarts_three_times_on_one_machine"
mutant("launch: the launcher ends well", "machinery/launch", "return code\n\n\nif __name__", "return 0\n\n\nif __name__", RESTARTS)
mutant("launch: the launcher does not tell the cause", "machinery/launch",
       "tell(cause)\n    return code\n\n\nif __name__", "pass\n    return code\n\n\nif __name__", RESTARTS)
mutant("restart: whoever asks for a stop gets another start", "machinery/launch", "or received or", "or",
       "test_launcher_starts_nothing_again_that_a_signal_asked_to_stop")
RESTART = "tell(f\"{cause or 'a rank failed, as it says above'}; restart {attempt + 1}\")"
mutant("restart: nobody is told", "machinery/launch", RESTART, "pass", RESTARTS)
mutant("restart: no word for a cause that a rank has told", "machinery/launch",
       "cause or 'a rank failed, as it says above'", "cause", RESTARTS)
mutant("restart: counted from 0", "machinery/launch", "restart {attempt + 1}", "restart {attempt}", RESTARTS)
mutant("restart: one more is told than is made", "machinery/launch", "and attempt < RESTARTS and", "and", RESTARTS)
TOLD_RANKS = "test_what_the_ranks_are_told"

for name, old, new in (
    ("RANK counts from 0 on each machine", '"RANK": args.node_rank * devices + local_rank,', '"RANK": local_rank,'),
    ("LOCAL_RANK counts over all machines", '"LOCAL_RANK": local_rank,\n            "WORLD_SIZE"',
     '"LOCAL_RANK": args.node_rank * devices + local_rank,\n            "WORLD_SIZE"'),
    ("WORLD_SIZE of this machine", '"WORLD_SIZE": args.nnodes * devices,', '"WORLD_SIZE": devices,'),
    ("LOCAL_WORLD_SIZE of all machines", '"LOCAL_WORLD_SIZE": devices,', '"LOCAL_WORLD_SIZE": args.nnodes * devices,'),
    ("no MASTER_ADDR on one machine", 'args.master_addr or "127.0.0.1"', "args.master_addr"),
    ("MASTER_PORT of another job", '"MASTER_PORT": args.master_port,', '"MASTER_PORT": os.environ.get("MASTER_PORT", 29500),'),
    ("every attempt is the first", '"TORCHELASTIC_RESTART_COUNT": attempt', '"TORCHELASTIC_RESTART_COUNT": 0'),
    ("other variables are lost", "os.environ | {name: str(value)", "{name: str(value)"),
    ("options are lost", "str(ROOT / script), *argv]", "str(ROOT / script)]"),
):
    mutant(f"ranks: {name}", "machinery/launch", old, new, TOLD_RANKS)

for name, old, new in (
    ("not told who starts them", 'args.master_port}")\n    os.environ["LAUNCH_PID"] = str(os.getpid())\n', 'args.master_port}")\n'),
    ("name their directory anew in every attempt", '    os.environ["TORCHELASTIC_RUN_ID"] = run_id\n', ""),
    ("of run.sh listen to all", "stay_on_this_machine()\n        for", "pass\n        for"),
):
    mutant(f"ranks: {name}", "machinery/launch", old, new, RESTARTS)
mutant("launch: a fixed place to meet", "machinery/launch", 'yield f"file://{directory}/ranks"',
       'yield "tcp://127.0.0.1:29500"', "test_pitfall_15_two_jobs_on_one_machine")
mutant("launch: a dead rank is success", "machinery/launch",
       'return 1, f"process {untold[0]} left', 'return 0, f"process {untold[0]} left',
       BLAME)
mutant("launch: a killed rank has a code of its own", "machinery/launch",
       'return 1, f"process {killed[0]} was killed',
       'return 128 + number, f"process {killed[0]} was killed',
       BLAME)
mutant("launch: signals not handed on", "machinery/launch", "os.kill(process.pid, number)", "pass", "test_pitfall_39_nothing_outlives_the_launcher[SIGINT]")
mutant("launch: 1 for the ranks' own code", "machinery/launch", 'return purpose[0], ""',
       'return 1, ""', BLAME)
mutant("launch: signals go to ranks that have ended", "machinery/launch",
       "                if code is None:\n                    os.kill(process.pid, number)",
       "                os.kill(process.pid, number)",
       "test_signal_for_a_rank_that_has_just_ended_is_no_error")
AGAIN = "test_when_the_launcher_restarts"
mutant("launch: a deliberate end is restarted", "machinery/launch", "if code != 1 or",
       "if code == 0 or", AGAIN)
mutant("launch: the code of a rank that was ended for another's sake", "machinery/launch",
       'return int(bool(failed)), ""', 'return max(failed, default=0), ""',
       BLAME)
mutant("launch: nobody says who was killed", "machinery/launch", "if killed := [rank",
       "if killed := [] and [rank", BLAME)
mutant("launch: ranks wait for one that has refused its input", "machinery/launch", " or 2 in ended:", ":",
       "test_refused_input_ends_the_other_ranks_at_once")
mutant("launch: every rank tells what all refuse", "machinery/processes", "            time.sleep(REPEATED)", "            str(REPEATED)",
       "test_input_that_all_ranks_refuse_is_told_once[1-waited1]")
mutant("launch: ranks of one machine meet at a port", "machinery/launch",
       '            os.environ["LAUNCH_RENDEZVOUS_FILE"] = f"{directory}/ranks"\n', "",
       RESTARTS, "test_signal_to_the_launcher_saves_and_ends_with_its_code[ddp-2-10]")
mutant("launch: signals end the launcher alone", "machinery/launch", "    handle_signals(send)\n",
       "", "test_signal_to_the_launcher_saves_and_ends_with_its_code[ddp-2-10]")
mutant("restart: an early failure is repeated", "machinery/launch",
       "restart = can_resume and attempt", "restart = attempt", AGAIN)
mutant("nodes: launchers restart ranks", "machinery/launch",
       "attempt < RESTARTS and args.nnodes == 1", "attempt < RESTARTS", "test_when_the_launcher_restarts[several machines]")
mutant("nodes: spawned ranks listen at the host's name", "machinery/launch", "            use_interface_to(url.hostname)\n", "",
       f"{LOST_NODE}[spawn-killed]")
mutant("nodes: a lost node is not called so", "machinery/launch",
       "if nnodes > 1 and {LOST, FAILED} & set(failed):", "if False:",
       "test_cause_of_a_failure_is_not_what_followed_from_it")
mutant("nodes: a node waits in silence", "machinery/launch",
       "            tell_place(args, args.dist_url)\n", "",
       "test_pitfall_40_two_launchers_are_one_job")
mutant("nodes: --master-addr is not checked", "machinery/launch",
       "    if args.nnodes > 1:\n        check_address", "    if False:\n        check_address",
       SEVERAL)
mutant("nodes: other nodes are to blame on one machine", "machinery/launch",
       "if nnodes > 1 and {LOST, FAILED} & set(failed):", "if {LOST, FAILED} & set(failed):",
       BLAME)
mutant("launch: no restarts on one machine", "machinery/launch",
       "RESTARTS = 3",
       "RESTARTS = 0",
       "test_launcher_restarts_three_times_on_one_machine")
mutant("launch: what followed from a failure is its cause", "machinery/launch",
       "set(failed) == {LOST}",
       "LOST in failed",
       "test_cause_of_a_failure_is_not_what_followed_from_it")

# ------------------------------------------------------------------------------------------------------------------ machinery/rendezvous.py

mutant("launch: ranks outlive torchrun", "machinery/rendezvous", "    end_with_parent(signal.SIGKILL)\n    if os.getppid()",
       "    if os.getppid()",
       "test_ranks_that_wait_before_training_end_with_the_launcher[ddp]")
SLURM = "test_pitfall_40_ranks_from_slurm", "test_pitfall_40_address_from_slurm"
mutant("slurm: local rank for the rank", "machinery/rendezvous", 'RANK=get("SLURM_PROCID")',
       'RANK=get("SLURM_LOCALID")', *SLURM)
mutant("slurm: a batch script is a rank", "machinery/rendezvous", '"SLURM_STEP_NODELIST" not in', '"SLURM_PROCID" not in', *SLURM)
mutant("slurm: ranks under torchrun are tasks", "machinery/rendezvous", '"RANK" in os.environ or "SLURM', '"SLURM', *SLURM)
mutant("slurm: nodes meet on localhost", "machinery/rendezvous", "first if len(tasks) > 1 else", "first if len(tasks) < 1 else", *SLURM)
mutant("slurm: nodes meet on the last one", "machinery/rendezvous", '.split(",")[0]', '.split(",")[-1]', *SLURM)
mutant("slurm: tasks of the first node on every node", "machinery/rendezvous",
       'tasks[int(get("SLURM_NODEID"))]', "tasks[0]", *SLURM)
mutant("launch: unknown host waited for", "machinery/rendezvous", "found = socket.getaddrinfo(host, None)[0][4][0]", 'found = ""', SEVERAL)
mutant("launch: a rank outlives a launcher that was killed before", "machinery/rendezvous", 'os.environ.get("LAUNCH_PID", os.getppid())', "os.getppid()",
       "test_rank_whose_launcher_was_killed_before_it_looked_ends")
mutant("launch: ranks meet where dead ones did", "machinery/rendezvous",
       'f"file://{file}-{attempt()}"', 'f"file://{file}"',
       "test_ranks_meet_in_a_file_of_their_own_after_a_restart")
mutant("launch: ranks of one machine listen to all", "machinery/rendezvous",
       'os.environ.setdefault(f"{library}_SOCKET_IFNAME", "lo")', "pass",
       "test_signal_to_the_launcher_saves_and_ends_with_its_code[ddp-2-10]")
mutant("launch: --timeout in minutes", "machinery/rendezvous", "timedelta(seconds=seconds)",
       "timedelta(minutes=seconds)", "test_timeout_reaches_the_process_group[ddp-2]")
mutant("nodes: gloo listens at the host's name", "machinery/rendezvous", "                if socket.inet_ntoa(answer[20:24]) == own:\n",
       "                if False:\n", f"{LOST_NODE}[run_sh-cut]")
mutant("nodes: any address is the first node's", "machinery/rendezvous", "if node_rank == 0:", "if False:",
       SEVERAL, "test_url_of_the_first_node_is_checked_too")
mutant("nodes: every node has to be at the address", "machinery/rendezvous", "if node_rank == 0:", "if True:",
       "test_url_of_the_first_node_is_checked_too")
mutant("nodes: the loopback is as good as any address", "machinery/rendezvous", 'if nnodes > 1 and found.startswith("127.") and', "if False and",
       "test_name_that_is_the_loopback_here_is_refused")
mutant("launch: a group without a default backend", "machinery/rendezvous", 'return "gloo"  #', 'return "cpu:gloo"  #',
       "test_group_on_the_cpu_has_a_default_backend_in_every_version")
mutant("slurm: one port for all jobs", "machinery/rendezvous",
       '20_000 + int(get("SLURM_JOB_ID")) % 10_000',
       "20_000",
       "test_pitfall_40_ranks_from_slurm", "test_pitfall_40_address_from_slurm")

# ------------------------------------------------------------------------------------------------------------------- machinery/processes.py

mutant("devices: the first one for all", "machinery/processes", "torch.accelerator.set_device_index(index)",
       "torch.accelerator.set_device_index(0)", "test_pitfall_17_device_is_chosen_before_anything_else")
mutant("devices: all cores for every process", "sampling", " // processes", "",
       "test_pitfall_38_workers_stay_and_cores_are_divided")
mutant("devices: --deterministic ignored", "machinery/processes", "torch.use_deterministic_algorithms(deterministic)",
       "torch.use_deterministic_algorithms(False)", "test_deterministic_is_handed_to_torch")
mutant("stop: Ctrl-C before training is left to Python", "machinery/processes", "signal.signal(signal.SIGINT, signal.SIG_DFL)", "None",
       "test_ctrl_c_while_ranks_start_is_answered_without_a_traceback")
mutant("stop: SIGTERM ends with 0", "machinery/processes", "signal.SIGTERM: 143", "signal.SIGTERM: 0", "test_pitfall_11_sigterm_saves[0]")
mutant("stop: SIGINT ends with 143", "machinery/processes", "signal.SIGINT: 130", "signal.SIGINT: 143",
       "test_pitfall_39_nothing_outlives_the_launcher[SIGINT]")
mutant("stop: SIGUSR1 ends with 138", "machinery/processes", "signal.SIGUSR1: 0", "signal.SIGUSR1: 138",
       "test_signal_to_all_ranks_is_one_signal")
mutant("launch: bad arguments end with 1", "machinery/processes", "            return 2\n",
       "            return 1\n", "test_bad_command_line_ends_with_code_2_and_one_line")
mutant("launch: a stop ends with 0", "machinery/processes", "code, reason = stop.code, stop.reason", "code, reason = 0, stop.reason",
       "test_pitfall_11_sigterm_saves[0]")
mutant("launch: leaves while others still talk to it", "machinery/processes",
       "            dist.barrier()  # rank 0 has saved, and nobody waits any more\n",
       "            pass\n", "test_early_end_of_all_ranks_waits_for_all")
mutant("launch: unused parameters not explained", "machinery/processes",
       'elif "find_unused_parameters=True" in words:', "elif False:", "test_pitfall_28_unused_parameters")
mutant("launch: signals stay blocked in the ranks", "machinery/processes", "    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)", "   ",
       "test_pitfall_39_nothing_outlives_the_launcher[SIGINT]")
mutant("end: SIGUSR2 is the end", "machinery/processes", "    faulthandler.register(signal.SIGUSR2, all_threads=True)", "   ",
       "test_sigusr2_shows_the_stacks_of_a_rank_and_lets_it_train_on")
mutant("end: SIGUSR2 shows one thread", "machinery/processes", "all_threads=True", "all_threads=False",
       "test_sigusr2_shows_the_stacks_of_a_rank_and_lets_it_train_on")
mutant("end: a rank that fails ends well", "machinery/processes", "leave(FAILED if launched else 1)", "leave(0)", "test_pitfall_06_dead_rank_ends_the_job[raises]")
mutant("end: a process without a launcher has a rank's code", "machinery/processes",
       "leave(FAILED if launched else 1)", "leave(FAILED)", "test_pitfall_06_error_with_loader_workers_ends_the_process")
mutant("end: what a rank has told is told again", "machinery/processes",
       "leave(FAILED if launched else 1)", "leave(1)", "test_pitfall_06_dead_rank_ends_the_job[raises]")
mutant("end: a rank that fails cuts its save short", "machinery/processes", "    wait_for_writer(GRACE)\n", "",
       "test_rank_that_fails_lets_its_save_end")
mutant("end: a rank that fails waits for a disk that hangs", "machinery/processes", "wait_for_writer(GRACE)", "wait_for_writer()",
       "test_rank_that_fails_does_not_wait_for_a_disk_that_hangs")
mutant("traces: a notebook cuts a save short", "machinery/processes", "            wait_for_writer()\n            at_end", "            at_end",
       "test_notebook_that_leaves_a_run_by_an_error_has_its_last_save")
mutant("end: a rank that fails does not tell why", "machinery/processes",
       "    traceback.print_exception(error)\n", "", "test_pitfall_06_dead_rank_ends_the_job[raises]")
mutant("end: a line without a word", "machinery/processes",
       "    if message:\n        print(", "    if True:\n        print(", "test_pitfall_06_dead_rank_ends_the_job[raises]")
mutant("end: torchrun learns nothing of a lost rank", "machinery/processes", "if lost and launched:", "if lost:",
       "test_rank_that_lost_another_leaves_in_silence_if_the_launcher_is_ours")
mutant("end: sys.exit is a traceback", "machinery/processes", "if isinstance(error, SystemExit):", "if False:",
       "test_task_that_leaves_by_sys_exit_is_no_success[single-1]")
mutant("end: all ranks say why", "machinery/processes", 'if os.environ.get("LOCAL_RANK", "0") == "0":', "if True:",
       "test_checkpoint_of_other_data_or_another_model_is_refused")
mutant("end: the code of a stop is not said", "machinery/processes", "{reason} (exit code {code})", "{reason}",
       "test_run_ends_with_the_code_of_the_stronger_signal")
mutant("slurm: cores of other jobs", "sampling", 'int(os.environ.get("SLURM_CPUS_ON_NODE", cores))', "cores",
       "test_pitfall_38_workers_stay_and_cores_are_divided")
mutant("launch: sys.exit(0) of a task is success", "machinery/processes", "        if code is None:\n", "        if False:\n",
       "test_task_that_leaves_by_sys_exit_is_no_success[ddp-2]")
mutant("launch: sys.exit(0) ends a device's run with 0", "machinery/processes",
       "except (Exception, SystemExit) as error:", "except Exception as error:",
       "test_task_that_leaves_by_sys_exit_is_no_success[single-1]")
mutant("launch: a task's own connection is taken for the ranks'", "machinery/processes",
       'r"(gloo|NCCL|SocketImpl|Store).*"', 'r"(|).*"',
       "test_lost_connection_is_one_to_another_rank")
mutant("launch: the last words are a victim's", "machinery/processes", "if lost and launched:",
       "if False:", "test_pitfall_06_dead_rank_ends_the_job[raises]")
mutant("nodes: who has not come is a traceback", "machinery/processes",
       'elif not dist.is_initialized() and "RANK" in os.environ and NOT_MET',
       "elif False and NOT_MET",
       "test_rank_that_cannot_start_does_not_leave_the_other_waiting", "test_spawned_ranks_whose_partners_never_come_say_so")
mutant("nodes: an error of one process is nobody's absence", "machinery/processes",
       '"RANK" in os.environ and NOT_MET', "NOT_MET",
       "test_ranks_that_cannot_reach_each_other_say_so")
mutant("nodes: only the first node says why", "machinery/processes",
       'if os.environ.get("LOCAL_RANK", "0") == "0":', 'if os.environ.get("RANK", "0") == "0":',
       "test_each_node_says_why_it_ends")
mutant("nodes: no way between the ranks is a traceback", "machinery/processes", "|connectFullMesh", "",
       "test_ranks_that_cannot_reach_each_other_say_so")
TRACES = "test_main_can_be_called_from_a_notebook_or_a_thread_and_leaves_no_trace"

for name, old, new in (
    ("nothing is put back", "            at_end.close()\n", ""),
    ("handlers stay", "at_end.callback(signal.signal, number,", "str("),
    ("a thread sets handlers", "if threading.current_thread() is not threading.main_thread():", "if False:"),
    ("variables stay", "            os.environ.clear()\n            os.environ.update(environment)\n", ""),
    ("new variables stay", "            os.environ.clear()\n", ""),
    ("signals that were blocked come through", "            signal.pthread_sigmask(signal.SIG_SETMASK, mask)\n", ""),
    ("nothing of the settings is put back", "                put_back(value)\n", "                pass\n"),
    ("threads stay", "    (torch.get_num_threads, torch.set_num_threads),\n", ""),
    ("deterministic kernels stay", "            torch.use_deterministic_algorithms(strict, warn_only=warn_only)\n", ""),
    ("deterministic kernels come back strict", "(strict, warn_only=warn_only)", "(strict)"),
    ("TF32 stays", "(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision)", "(random.getstate, random.setstate)"),
    ("benchmark stays", "            cudnn.benchmark = benchmark\n", ""),
    ("Python's generator stays seeded", "    (random.getstate, random.setstate),\n", ""),
    ("numpy's generator stays seeded", "    (np.random.get_state, np.random.set_state),\n", ""),
    ("torch's generator stays seeded", "    (torch.get_rng_state, torch.set_rng_state),\n", ""),
    ("warnings stay hidden", "with warnings.catch_warnings():", "with contextlib.nullcontext():"),
):
    mutant(f"traces: {name}", "machinery/processes", old, new, TRACES)
mutant("devices: all cores for every process beside an accelerator", "machinery/processes", 'if "OMP_NUM_THREADS" not in os.environ:',
       'if device_type == "cpu" and "OMP_NUM_THREADS" not in os.environ:',
       "test_pitfall_38_workers_stay_and_cores_are_divided")
mutant("signals: Ctrl-C is stronger than the system", "machinery/processes", "signal.SIGINT: 130, signal.SIGTERM: 143}", "signal.SIGTERM: 143, signal.SIGINT: 130}",
       WINS)
mutant("signals: SLURM's warning is the strongest", "machinery/processes", "{signal.SIGUSR1: 0, signal.SIGINT: 130, signal.SIGTERM: 143}",
       "{signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGUSR1: 0}", WINS)
mutant("restart: from a file of an earlier run", "machinery/launch", "!= before\n", "!= 0\n",
       "test_launcher_restarts_only_from_what_this_run_wrote")
mutant("restart: auto has to write first", "machinery/launch", "(before and args.resume", "(False and args.resume",
       "test_launcher_restarts_only_from_what_this_run_wrote")
mutant("launch: a signal for a rank that has ended", "machinery/launch", "contextlib.suppress(ProcessLookupError)", "contextlib.nullcontext()",
       "test_signal_for_a_rank_that_has_just_ended_is_no_error")

# What accelerators would meet
mutant("run.sh: tests see the accelerators", "run.sh", '|| export CUDA_VISIBLE_DEVICES=""', "|| true",
       "test_what_proves_the_code_sees_no_accelerator")
mutant("run.sh: tests marked gpu see no accelerator", "run.sh", '[[ " $* " == *" -m gpu"* ]] || export', "export",
       "test_what_proves_the_code_sees_no_accelerator")
mutant("launch: a rank that NCCL aborts is blamed", "machinery/launch", "if nnodes > 1 or causes:", "if nnodes > 99 and causes:",
       "test_rank_that_nccl_aborts_is_not_the_cause")
mutant("launch: an abort is never the cause", "machinery/launch", "{None, 0, LOST, -signal.SIGABRT}", "{None, 0, -signal.SIGABRT}",
       "test_rank_that_nccl_aborts_is_not_the_cause")
mutant("launch: NCCL's abort on several nodes", "machinery/launch", "if nnodes > 1 or causes:", "if causes:",
       "test_rank_that_nccl_aborts_is_not_the_cause")
mutant("devices: convolutions use TF32", "machinery/processes", "            cudnn.allow_tf32 = False\n", "            pass\n",
       "test_deterministic_convolutions_do_not_use_tf32")
mutant("traces: TF32 of convolutions stays off", "machinery/processes", 'at_end.callback(setattr, cudnn, "allow_tf32", cudnn.allow_tf32)', "pass",
       "test_deterministic_convolutions_do_not_use_tf32")
mutant("end: a late signal kills", "machinery/processes", "        signal.signal(number, signal.SIG_IGN)\n    # A device", "        pass\n    # A device",
       "test_signal_in_pythons_last_clean_up_is_too_late")
LAST = "test_rank_of_shards_ends_before_the_last_clean_up_of_python"
mutant("end: Python cleans up after a rank of shards", "machinery/processes", 'if codes and "machinery.sharding" in sys.modules:', "if False:", LAST)
mutant("end: every rank leaves so", "machinery/processes", 'if codes and "machinery.sharding" in sys.modules:', "if codes:", LAST)
mutant("end: what was registered earlier is left out", "machinery/processes", "        logging.shutdown()\n", "", LAST)
mutant("devices: newer names of the precision", "machinery/processes", "with contextlib.suppress(RuntimeError):", "with contextlib.suppress(KeyError):", "test_caller_may_have_chosen_the_precision_by_newer_names")
mutant("save: an error that the caller handles is shown", "common", "not in (None, handled):", "is not None:", "test_refused_write_is_not_explained_by_an_older_error")
mutant("average: another number of buffers", "common", "zip(self.is_averaged, averages, values, strict=True)", "zip(self.is_averaged, averages, values)", "test_network_that_grows_a_buffer_is_not_averaged")
mutant("end: a rank that was stopped is cleaned up", "machinery/processes", "    codes.append(code)\n    return code\n\n\ndef fail", "    return code\n\n\ndef fail", LAST)
mutant("end: a killed worker is no cause", "machinery/processes", '"rebuild_storage_fd" in calls', "False",
       "test_batch_of_a_killed_worker_tells_of_the_worker")
