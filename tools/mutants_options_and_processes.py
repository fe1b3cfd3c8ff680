"""Mutants: options and processes."""

from mutants_base import *
from mutants_loops_and_common import *

# One fault takes two or three lines here, and not seven.
# fmt: off

# -------------------------------------------------------------------------------------- machinery/launch.py, machinery/processes.py, machinery/options.py

BLAME = f"{ENDINGS}end_of_a_run_is_told_by_the_rank_that_is_to_blame"
AGAIN = "defaults::test_when_the_launcher_restarts"
RESTARTS = "defaults::test_launcher_restarts_three_times_on_one_machine"
TOLD_RANKS = "defaults::test_what_the_ranks_are_told"

mutant("launch: rank 0 of each machine writes", "machinery/run", "self._on_rank0(self._open)",
       'self._open() if os.environ.get("LOCAL_RANK", "0") == "0" else None',
       LAST + "32_one_rank_of_all_machines_saves")
mutant("launch: every rank prints", "common", "    if get_rank() == 0:\n        print(",
       "    if True:\n        print(",
       f"{ENDINGS}signal_during_an_evaluation_finds_the_run_saved_and_stops_it_after_the_evaluation[ddp-2]")
mutant("launch: bad arguments end with 1", "machinery/processes", "            return 2\n",
       "            return 1\n", "cli::test_bad_command_line_ends_with_code_2_and_one_line")
mutant("launch: a stop ends with 0", "machinery/processes", "return stop.code", "return 0",
       ONE + "11_sigterm_saves[0]")
mutant("launch: leaves while others still talk to it", "machinery/processes",
       "            dist.barrier()  # rank 0 has saved, and nobody waits any more\n",
       "            pass\n", f"{ENDINGS}early_end_of_all_ranks_waits_for_all")
mutant("launch: unused parameters not explained", "machinery/processes",
       'elif "find_unused_parameters=True" in words:', "elif False:", MANY + "28_unused_parameters")
mutant("launch: ranks outlive torchrun", "machinery/rendezvous", "    end_with_parent(signal.SIGKILL)\n    if os.getppid()",
       "    if os.getppid()",
       "signals::test_ranks_that_wait_before_training_end_with_the_launcher[ddp]")
mutant("launch: spawned ranks outlive the launcher", "machinery/launch",
       "    end_with_parent(signal.SIGKILL)\n    if not mp.parent_process().is_alive():", "    if not mp.parent_process().is_alive():",
       "signals::test_ranks_that_wait_before_training_end_with_the_launcher[spawn]")
mutant("launch: ranks without a launcher do not save", "machinery/run", "end_with_parent(signal.SIGTERM)", "pass",
       LAST + "39_nothing_outlives_torchrun")
mutant("launch: a Python that starts meets Ctrl-C", "machinery/launch",
       '    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)\n    os.environ["LAUNCH_PID"]',
       '    os.environ["LAUNCH_PID"]',
       "signals::test_ctrl_c_while_ranks_start_is_answered_without_a_traceback[spawn-kill]")
mutant("launch: a signal before training is a failure", "machinery/launch", "if number in received:", "if False:", BLAME)

# How the launcher starts, waits and starts again
mutant("launch: a failed rank is success", "machinery/launch", 'return FAILED if failed else 0, ""', 'return 0, ""', BLAME)
mutant("launch: ranks that stopped together are started again", "machinery/launch", "if set(ended) == {1}:", "if False:", BLAME)
mutant("launch: one rank that failed speaks for all", "machinery/launch", "if set(ended) == {1}:", "if 1 in ended:", BLAME)
mutant("launch: ranks that hang are waited for", "machinery/launch", "            process.kill()\n", "", BLAME)
mutant("launch: the others have no time after a failure", "machinery/launch",
       "min(deadline, time.monotonic() + GRACE)", "time.monotonic()", BLAME)
mutant("launch: divergence is no end on purpose", "machinery/launch", "{2, 3, 130, 143}", "{2, 130, 143}", BLAME)
mutant("launch: SIGTERM and its saving is no end on purpose", "machinery/launch", "{2, 3, 130, 143}", "{2, 3, 130}", BLAME)
mutant("launch: any signal was asked for", "machinery/launch", "if number in received:", "if received or number in SIGNALS:", BLAME)
mutant("launch: a rank that starts meets Ctrl-C", "machinery/launch",
       "    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)\n    processes = []", "    processes = []",
       "signals::test_ctrl_c_while_ranks_start_is_answered_without_a_traceback[ddp-kill]")
mutant("launch: which signals came is forgotten", "machinery/launch", "        received.append(number)\n", "",
       "signals::test_ctrl_c_while_ranks_start_is_answered_without_a_traceback[spawn-kill]")
mutant("launch: signals stay blocked in the launcher", "machinery/launch", "    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)\n", "",
       LAST + "39_nothing_outlives_the_launcher[SIGINT]")
mutant("launch: signals stay blocked in the ranks", "machinery/processes", "    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)", "   ",
       LAST + "39_nothing_outlives_the_launcher[SIGINT]")
mutant("launch: the launcher of spawned ranks has a rank's code", "machinery/launch",
       "[])\n    tell(cause)\n    return 1 if code == FAILED else code", "[])\n    tell(cause)\n    return code",
       ONE + "06_dead_rank_ends_the_job[raises]")
mutant("launch: the launcher of spawned ranks does not tell the cause", "machinery/launch",
       "[])\n    tell(cause)\n", "[])\n", ONE + "06_dead_rank_ends_the_job[is killed]")
mutant("launch: spawned ranks take themselves for torchrun's", "machinery/launch",
       'SIGNALS)\n    os.environ["LAUNCH_PID"] = str(os.getpid())\n', "SIGNALS)\n", ONE + "06_dead_rank_ends_the_job[raises]")
mutant("launch: spawned ranks of one machine listen to all", "machinery/launch",
       "            stay_on_this_machine()\n            yield", "            yield",
       "signals::test_ranks_that_wait_before_training_end_with_the_launcher[spawn]")
mutant("launch: the launcher has a rank's code", "machinery/launch",
       "return 1 if code == FAILED else code\n\n\nif __name__", "return code\n\n\nif __name__", RESTARTS)
mutant("launch: the launcher does not tell the cause", "machinery/launch",
       "tell(cause)\n    return 1 if code == FAILED else code\n\n\nif __name__",
       "pass\n    return 1 if code == FAILED else code\n\n\nif __name__", RESTARTS)
mutant("restart: whoever asks for a stop gets another start", "machinery/launch", "or received or", "or",
       f"{ENDINGS}launcher_starts_nothing_again_that_a_signal_asked_to_stop")
mutant("restart: the ranks do not hear the cause", "machinery/launch",
       '            os.environ["LAUNCH_FAILURE"] = cause or "a rank failed, as it says above"\n', "", RESTARTS)
mutant("restart: no word for a cause that a rank has told", "machinery/launch",
       'cause or "a rank failed, as it says above"', "cause", RESTARTS)
mutant("restart: the cause is not shown", "machinery/run", 'print0(f"restart {attempt()}: {cause}", file=sys.stderr)', "pass",
       "faults::test_run_sh_ddp_goes_on_by_itself_when_a_rank_dies")
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
    ("options are lost", '"train_ddp.py"), *argv]', '"train_ddp.py")]'),
):
    mutant(f"ranks: {name}", "machinery/launch", old, new, TOLD_RANKS)
for name, old, new in (
    ("not told who starts them", 'args.master_port}")\n    os.environ["LAUNCH_PID"] = str(os.getpid())\n', 'args.master_port}")\n'),
    ("name their directory anew in every attempt", '    os.environ["TORCHELASTIC_RUN_ID"] = run_id\n', ""),
    ("of run.sh listen to all", "stay_on_this_machine()\n        for", "pass\n        for"),
):
    mutant(f"ranks: {name}", "machinery/launch", old, new, RESTARTS)

# How a process ends
mutant("end: SIGUSR2 is the end", "machinery/processes", "    faulthandler.register(signal.SIGUSR2, all_threads=True)", "   ",
       "signals::test_sigusr2_shows_the_stacks_of_a_rank_and_lets_it_train_on")
mutant("end: SIGUSR2 shows one thread", "machinery/processes", "all_threads=True", "all_threads=False",
       "signals::test_sigusr2_shows_the_stacks_of_a_rank_and_lets_it_train_on")
mutant("end: a process without a launcher has a rank's code", "machinery/processes",
       "leave(FAILED if launched else 1)", "leave(FAILED)", ONE + "06_error_with_loader_workers_ends_the_process")
mutant("end: what a rank has told is told again", "machinery/processes",
       "leave(FAILED if launched else 1)", "leave(1)", ONE + "06_dead_rank_ends_the_job[raises]")
mutant("end: a rank that fails does not tell why", "machinery/processes",
       "    traceback.print_exception(error)\n", "", ONE + "06_dead_rank_ends_the_job[raises]")
mutant("end: a line without a word", "machinery/processes",
       "    if message:\n        print(", "    if True:\n        print(", ONE + "06_dead_rank_ends_the_job[raises]")
mutant("end: torchrun learns nothing of a lost rank", "machinery/processes", "if lost and launched:", "if lost:",
       f"{ENDINGS}rank_that_lost_another_leaves_in_silence_if_the_launcher_is_ours")
mutant("end: sys.exit is a traceback", "machinery/processes", "if isinstance(error, SystemExit):", "if False:",
       f"{ENDINGS}task_that_leaves_by_sys_exit_is_no_success[single-1]")
mutant("end: all ranks say why", "machinery/processes", 'if os.environ.get("LOCAL_RANK", "0") == "0":', "if True:",
       f"{ENDINGS}checkpoint_of_other_data_or_another_model_is_refused")
mutant("end: the code of a stop is not said", "machinery/processes", "{stop.reason} (exit code {stop.code})", "{stop.reason}",
       "two_signals::test_run_ends_with_the_code_of_the_stronger_signal")

SLURM = LAST + "40_ranks_from_slurm", LAST + "40_address_from_slurm"
mutant("slurm: local rank for the rank", "machinery/rendezvous", 'RANK=get("SLURM_PROCID")',
       'RANK=get("SLURM_LOCALID")', *SLURM)
mutant("slurm: a batch script is a rank", "machinery/rendezvous", '"SLURM_STEP_NODELIST" not in', '"SLURM_PROCID" not in', *SLURM)
mutant("slurm: ranks under torchrun are tasks", "machinery/rendezvous", '"RANK" in os.environ or "SLURM', '"SLURM', *SLURM)
mutant("slurm: nodes meet on localhost", "machinery/rendezvous", "first if len(tasks) > 1 else", "first if len(tasks) < 1 else", *SLURM)
mutant("slurm: nodes meet on the last one", "machinery/rendezvous", '.split(",")[0]', '.split(",")[-1]', *SLURM)
mutant("slurm: tasks of the first node on every node", "machinery/rendezvous",
       'tasks[int(get("SLURM_NODEID"))]', "tasks[0]", *SLURM)
mutant("slurm: tasks that each have a device are too many", "machinery/options", " and not by_srun", "",
       "cli::test_more_processes_than_accelerators_is_refused")
mutant("slurm: only the first task checks", "machinery/check", "(torchrun and os.environ", "(os.environ", "cli::test_every_task_of_srun_checks")
mutant("slurm: cores of other jobs", "machinery/processes", 'int(os.environ.get("SLURM_CPUS_ON_NODE", cores))', "cores",
       LAST + "38_workers_stay_and_cores_are_divided")
mutant("launch: a fixed place to meet", "machinery/launch", 'yield f"file://{directory}/ranks"',
       'yield "tcp://127.0.0.1:29500"', MANY + "15_two_jobs_on_one_machine")
mutant("launch: unknown host waited for", "machinery/rendezvous", "found = socket.getaddrinfo(host, None)[0][4][0]", 'found = ""',
       f"{REFUSED}[spawn-2 --nnodes 2 --node-rank 0 --dist-url tcp://no-such-host.invalid:29500]")
mutant("launch: a dead rank is success", "machinery/launch",
       'return FAILED, f"process {untold[0]} left', 'return 0, f"process {untold[0]} left',
       BLAME)
mutant("launch: a killed rank has a code of its own", "machinery/launch",
       'return FAILED, f"process {killed[0]} was killed',
       'return 128 + number, f"process {killed[0]} was killed',
       BLAME)
mutant("launch: signals not handed on", "machinery/launch", "os.kill(process.pid, number)", "pass", LAST + "39_nothing_outlives_the_launcher[SIGINT]")
mutant("launch: 1 for the ranks' own code", "machinery/launch", 'return purpose[0], ""',
       'return 1, ""', BLAME)
mutant("launch: signals go to ranks that have ended", "machinery/launch",
       "            if code is None:\n                os.kill(process.pid, number)",
       "            os.kill(process.pid, number)",
       "signals::test_signal_when_all_is_done_changes_nothing")
mutant("launch: sys.exit(0) of a task is success", "machinery/processes", "        if code is None:\n", "        if False:\n",
       f"{ENDINGS}task_that_leaves_by_sys_exit_is_no_success[ddp-2]")
mutant("launch: sys.exit(0) ends a device's run with 0", "machinery/processes",
       "except (Exception, SystemExit) as error:", "except Exception as error:",
       f"{ENDINGS}task_that_leaves_by_sys_exit_is_no_success[single-1]")
mutant("launch: a deliberate end is restarted", "machinery/launch", "if code != FAILED or",
       "if code == 0 or", AGAIN)
mutant("launch: a rank outlives a launcher that was killed before", "machinery/rendezvous", 'os.environ.get("LAUNCH_PID", os.getppid())', "os.getppid()",
       f"{ENDINGS}rank_whose_launcher_was_killed_before_it_looked_ends")
mutant("launch: a task's own connection is taken for the ranks'", "machinery/processes",
       'r"(gloo|NCCL|SocketImpl|Store).*"', 'r"(|).*"',
       f"{ENDINGS}lost_connection_is_one_to_another_rank")
mutant("launch: the code of a rank that was ended for another's sake", "machinery/launch",
       'return FAILED if failed else 0, ""', 'return max(failed, default=0), ""',
       BLAME)
mutant("launch: nobody says who was killed", "machinery/launch", "if killed := [rank",
       "if killed := [] and [rank", BLAME)
mutant("resume: from an older checkpoint leaves the newer last.pt", "machinery/files", 'path.resolve() !=', "None is",
       f"{ENDINGS}going_back_to_an_older_checkpoint_is_going_back")
mutant("resume: another run overwritten that ended meanwhile", "machinery/files", "if before != (last.exists()",
       "if before is last and (last.exists()", f"{ENDINGS}run_that_ended_while_this_one_was_starting_is_not_overwritten")
mutant("divergence: not seen at the end", "machinery/run",
       "ends or state.global_step % MAX_SKIPPED_IN_A_ROW == 0",
       "state.global_step % MAX_SKIPPED_IN_A_ROW == 0", DIVERGED)
mutant("resume: auto overwrites a run of which only the best is left", "machinery/files",
       "elif others:", "elif False:",
       f"{ENDINGS}auto_does_not_start_over_a_run_of_which_only_the_best_is_left")
mutant("launch: the last words are a victim's", "machinery/processes", "if lost and launched:",
       "if False:", ONE + "06_dead_rank_ends_the_job[raises]")
mutant("launch: ranks meet where dead ones did", "machinery/rendezvous",
       'f"file://{file}-{attempt()}"', 'f"file://{file}"',
       f"{ENDINGS}ranks_meet_in_a_file_of_their_own_after_a_restart")
mutant("launch: ranks of one machine listen to all", "machinery/rendezvous",
       'os.environ.setdefault(f"{library}_SOCKET_IFNAME", "lo")', "pass",
       "signals::test_signal_to_the_launcher_saves_and_ends_with_its_code[ddp-2-10]")
mutant("launch: options checked by the ranks", "machinery/launch", "    check_run(args)  # here", "    # here",
       "nodes::test_several_nodes_are_checked_before_anything_is_started")
mutant("launch: ranks of one machine meet at a port", "machinery/launch",
       '            os.environ["LAUNCH_RENDEZVOUS_FILE"] = f"{directory}/ranks"\n', "",
       RESTARTS, "signals::test_signal_to_the_launcher_saves_and_ends_with_its_code[ddp-2-10]")
mutant("resume: another training set not noticed", "machinery/files", "if before != samples:",
       "if False:", f"{ENDINGS}checkpoint_of_other_data_or_another_model_is_refused")
mutant("resume: a model that does not fit is a traceback", "machinery/run",
       "except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:", "except ZeroDivisionError as error:",
       f"{ENDINGS}checkpoint_of_other_data_or_another_model_is_refused")
mutant("save: whatever a task puts into its arguments", "machinery/run", "if isinstance(v, plain)}",
       "}", f"{ENDINGS}what_a_task_puts_into_its_arguments_does_not_spoil_the_checkpoint")
mutant("load: values not looked at", "common", "    wrong = [name", "    wrong = [] and [name",
       f"{REFUSED}[single-1 --resume TMP/format.pt]")
mutant("load: negative positions", "common", "if kind is int and checkpoint[name] < 0]", "if False]",
       f"{REFUSED}[single-1 --resume TMP/negative.pt]")
mutant("load: a compressed file may fill the memory", "common", "member.compress_type != zipfile.ZIP_STORED", "False",
       "security::test_compressed_file_is_refused_unread")
mutant("log: a foreign line ends the run", "machinery/files", "except (ValueError, KeyError, TypeError):", "except ValueError:",
       "checkpoint::test_line_of_another_program_in_the_log_is_cut_off")
mutant("scaler: a NaN stays in BatchNorm", "common", "torch.where(bad > 0, kept", "torch.where(bad > 2, kept",
       f"{ENDINGS}skipped_step_leaves_no_trace_in_batchnorm")
mutant("scaler: BatchNorm goes back to before the resume", "common", "torch.cat(buffers, out=kept)  # of the", "pass  #",
       f"{ENDINGS}skipped_step_leaves_no_trace_in_batchnorm")
mutant("scaler: ten in a row are forgotten", "common", "self.in_a_row < MAX_SKIPPED_IN_A_ROW,", "self.in_a_row < 99,",
       f"{ENDINGS}ten_skipped_steps_in_a_row_are_remembered")
mutant("data: --skip-corrupt ignored", "sampling", "if not self.skip_corrupt:", "if True:",
       f"{ENDINGS}broken_sample_is_named_or_replaced_alike_everywhere")
mutant("data: the replacement is drawn as the broken one", "sampling",
       "self._first_readable(read, index)[1]",
       "self._first_readable(\n    lambda i: read(i) if i == index else self.dataset[i], index\n)[1]",
       f"{ENDINGS}broken_sample_is_named_or_replaced_alike_everywhere")
mutant("data: a broken file is not named", "task", 'raise OSError(f"{os.fsdecode(paths[0])}: {error}") from None', "raise",
       f"{ENDINGS}broken_image_file_is_named")
mutant("workers: start when the ranks have met", "sampling", "        processes = iter(loader)._workers\n", "        processes = []\n",
       f"{ENDINGS}workers_start_before_there_are_threads_whose_locks_a_fork_would_copy[ddp]")
mutant("workers: load what is not wanted", "sampling", "        sampler = _Late(sampler)\n", "        sampler.begun = True\n",
       f"{ENDINGS}workers_load_nothing_that_a_resumed_run_skips")
mutant("launch: signals end the launcher alone", "machinery/launch", "    handle_signals(send)\n",
       "", "signals::test_signal_to_the_launcher_saves_and_ends_with_its_code[ddp-2-10]")
mutant("restart: begins anew", "machinery/files", 'args.resume == "auto" or attempt():',
       'args.resume == "auto":', "survivors::test_restarted_process_goes_on_or_begins_anew")
mutant("restart: an early failure is repeated", "machinery/launch",
       "or received or not last.exists():", "or received:", AGAIN)
mutant("restart: refused because its folder holds a run", "machinery/options",
       "and not attempt() and", "and", "survivors::test_restarted_process_goes_on_or_begins_anew")
mutant("launch: --timeout in minutes", "machinery/rendezvous", "timedelta(seconds=seconds)",
       "timedelta(minutes=seconds)", "survivors::test_timeout_reaches_the_process_group[ddp-2]")

mutant("options: batch size not compared with devices", "machinery/options",
       "refuse(args.batch_size < least,", "refuse(False,", f"{REFUSED}[ddp-65 ]")
mutant("options: accumulation not counted", "machinery/options",
       "least = world_size * args.accum_steps", "least = world_size",
       f"{REFUSED}[single-1 --accum-steps 65]")
mutant("options: --local_rank unknown", "machinery/options",
       ' + ["--local_rank"] * (option.name == "--local-rank")', "",
       "cli::test_local_rank_is_accepted_in_both_spellings[--local_rank=3]")
mutant("options: booleans cannot be turned off", "machinery/options", '"action": argparse.BooleanOptionalAction', '"action": "store_true"',
       "cli::test_booleans_can_be_turned_off_and_help_is_readable[single]")
mutant("options: abbreviations accepted", "machinery/options", "allow_abbrev=False",
       "allow_abbrev=True", f"{REFUSED}[single-1 --batch 32]")
mutant("options: infinity is a number", "machinery/options", "or not math.isfinite(value)", "", f"{REFUSED}[single-1 --lr inf]")
mutant("options: a run is overwritten", "machinery/options", "refuse(taken,", "refuse(False,",
       f"{REFUSED}[single-1 --output-dir TMP/run]")
mutant("options: more processes than accelerators", "machinery/options", "here > available and",
       "False and", "cli::test_more_processes_than_accelerators_is_refused")
mutant("options: sync-bn in data parallel", "machinery/options",
       'refuse(mode == "dp" and args.sync_bn,', "refuse(False,", f"{REFUSED}[dp-2 --sync-bn]")
mutant("options: fp16 and float64 together", "machinery/options", "refuse(both,", "refuse(False,",
       f"{REFUSED}[single-1 --amp fp16 --dtype float64]")
mutant("options: a task without metrics", "machinery/tasks", "zip(Task._fields, functions)",
       "zip(Task._fields[:3], functions)", f"{REFUSED}[single-1 --task TMP/three.py]")
mutant("options: keyword-only options of a task not filled in", "machinery/tasks",
       "{name: getattr(args, name) for name in names}", "{name: 0.0 for name in names}",
       "survivors::test_label_smoothing_reaches_the_loss")

# ------------------------------------------------------------------------------------------------ machinery/stand_ins.py, task.py

mutant("replicas: buffers shared", "machinery/stand_ins", "name: b.clone() for", "name: b for",
       "survivors::test_data_parallel_is_ddp_with_batchnorm")
mutant("replicas: buffers never updated", "machinery/stand_ins", "return [buffers, *copies]",
       "return [copies[0], *copies]", "survivors::test_data_parallel_is_ddp_with_batchnorm")
mutant("replicas: all drop the same units", "machinery/stand_ins", "seed_generators(seed + r)",
       "seed_generators(seed)", f"{MASKS}[dp-2]")
mutant("replicas: cut otherwise than torch does", "machinery/stand_ins",
       "tensor.chunk(len(device_ids))[r]", "tensor.tensor_split(len(device_ids))[r]",
       LAST + "29_data_parallel_gathers_losses")
mutant("replicas: first outputs twice", "machinery/stand_ins", "torch.cat(outputs)",
       "torch.cat([outputs[0], *outputs[:-1]])", f"{EQUAL}[dp-2-1]")
mutant("sync-bn: no gradient through the mean", "machinery/stand_ins",
       "AllReduceSum.apply(torch.cat([value.sum(dims), count]))",
       "AllReduceSum.apply(torch.cat([value.sum(dims), count]).detach())", f"{SYNC_BN}[1d-default-2]")
mutant("sync-bn: no gradient through the variance", "machinery/stand_ins",
       "AllReduceSum.apply(centred.square().sum(dims))", "AllReduceSum.apply(centred.square().sum(dims).detach())",
       f"{SYNC_BN}[1d-default-2]")
mutant("sync-bn: biased running variance", "machinery/stand_ins",
       "variance.detach() * (n / (n - 1))", "variance.detach()", f"{SYNC_BN}[1d-default-2]")
mutant("sync-bn: variance of the rank alone", "machinery/stand_ins",
       "AllReduceSum.apply(centred.square().sum(dims)) / n", "centred.square().mean(dims)",
       f"{SYNC_BN}[1d-default-2]")
mutant("sync-bn: mean of the ranks' means", "machinery/stand_ins", "torch.cat([value.sum(dims), count])",
       "torch.cat([value.mean(dims), torch.ones_like(count)])", f"{SYNC_BN}[1d-default-2]")
mutant("sync-bn: momentum None", "machinery/stand_ins",
       "factor = 1 / self.num_batches_tracked.item()", "factor = 0.1",
       f"{SYNC_BN}[1d-momentum None-2]")
mutant("sync-bn: statistics of the batch in evaluation", "machinery/stand_ins",
       "if not self.training or not dist", "if not dist", f"{SYNC_BN}[1d-default-2]")

mutant("task: augmentation without the epoch", "task",
       "keyed_uniform(self.seed, self.epoch, indices, 3)\n        images = shift",
       "keyed_uniform(self.seed, 0, indices, 3)\n        images = shift",
       f"{AUGMENTED}[0-3-0-in memory]")
mutant("task: augmentation by the place in the batch", "task",
       "self.epoch, indices, 3)\n        images = shift",
       "self.epoch, np.arange(len(indices)), 3)\n        images = shift",
       f"{AUGMENTED}[0-3-0-in memory]")
mutant("task: augmentation without the seed", "task", "shift=1, seed=args.seed)", "shift=1)",
       "survivors::test_default_task_augments_by_the_seed_and_only_in_training")
mutant("task: held-out images augmented", "task", "ImagesInMemory(images[1437:], labels[1437:])",
       "ImagesInMemory(images[1437:], labels[1437:], shift=1)", "survivors::test_default_task_augments_by_the_seed_and_only_in_training")
mutant("task: trained on held-out images", "task", "ImagesInMemory(images[:1437], labels[:1437]", "ImagesInMemory(images, labels",
       "sampling::test_digits_are_split_as_the_licence_note_says")
mutant("task: label smoothing ignored", "task", ", label_smoothing=label_smoothing)", ")",
       "survivors::test_label_smoothing_reaches_the_loss")
mutant("task: top1 is the worst guess", "task", '"top1": hits[:, 0]', '"top1": hits[:, -1]', "survivors::test_metrics_of_the_default_task")
mutant("task: shift to one side only", "task", "* windows.shape[2]).astype(int)", "* (windows.shape[2] // 2 + 1)).astype(int)",
       "sampling::test_shift_moves_the_image_by_at_most_one_pixel")

NEW = "data_and_models::test_"
mutant("balanced: every sample equally often", "sampling", "if not self.balanced:", "if True:",
       f"{NEW}balanced_draws_every_class_equally_often_and_every_sample_of_it")
mutant("balanced: the first of each class alone", "sampling",
       "first[drawn] + (uniform * self.sizes[drawn]).long()", "first[drawn]",
       f"{NEW}balanced_draws_every_class_equally_often_and_every_sample_of_it")
mutant("balanced: without targets, not balanced", "sampling", "if targets.shape != (len(dataset),):",
       "if False:", f"{NEW}balanced_needs_the_class_of_each_sample")
mutant("balanced: not resumed as such", "machinery/options", 'flag("--balanced", NONE,',
       'flag("--balanced", MAY_CHANGE,',
       "checkpoint::test_changed_option_that_would_change_the_run_is_refused_by_name[--balanced]")
mutant("task: every image mirrored", "task", "mirrored = draws[:, 2] < 0.5", "mirrored = draws[:, 2] < 1.5",
       f"{NEW}flip_mirrors_about_every_second_image_and_shift_cuts_a_window")
mutant("task: --download by all at once", "task",
       "file_lock(args.data_dir) if args.download else contextlib.nullcontext()",
       "contextlib.nullcontext()", f"{NEW}torchvision_sets_are_downloaded_under_the_lock")
mutant("download: no lock", "task", "fcntl.flock(descriptor, fcntl.LOCK_EX)", "pass", f"{NEW}one_process_at_a_time_downloads")
mutant("weights: not loaded", "common", "    net.load_state_dict(fits, strict=False)\n", "",
       f"{NEW}weights_of_another_network_are_loaded_as_far_as_they_fit_and_the_rest_is_named")
mutant("weights: prefixes kept", "common", 'name = name.partition(".")[2]', "break",
       f"{NEW}weights_of_another_network_are_loaded_as_far_as_they_fit_and_the_rest_is_named")
mutant("weights: what is left out is not named", "common",
       "for name in [name for name in own if name not in fits]:", "for name in []:",
       f"{NEW}weights_of_another_network_are_loaded_as_far_as_they_fit_and_the_rest_is_named")
mutant("weights: none that fits is accepted", "common", "    if not fits:", "    if False:",
       f"{NEW}weights_that_do_not_fit_at_all_or_are_damaged_are_refused")
mutant("weights: ignored in a run", "machinery/tasks",
       'load_weights(net, weights, f"--weights {args.weights}")', "pass",
       f"{NEW}weights_are_where_training_starts_in_every_mode[single-1]")
mutant("freeze: BatchNorm keeps learning", "common",
       "            norm.eval()  # it keeps its statistics\n", "            pass\n",
       f"{NEW}frozen_batchnorm_keeps_its_statistics[ddp-2]")
mutant("freeze: BatchNorm that is half frozen does not learn", "common", "if parameters and not any(parameter.requires_grad",
       "if parameters and not all(parameter.requires_grad", f"{NEW}frozen_batchnorm_keeps_its_statistics[single-1]")
mutant("swa: statistics not estimated", "machinery/run",
       'if self.args.average == "swa" and state.step == self.steps_per_epoch:', "if False:",
       f"{NEW}swa_statistics_are_those_that_torch_estimates")
mutant("swa: statistics of the next epoch", "machinery/run", "set_position(self.state.epoch, 0)",
       "set_position(self.state.epoch + 1, 0)",
       f"{NEW}swa_statistics_are_those_that_torch_estimates")
mutant("swa: statistics of the last batches", "common", "        norm.momentum = None  # a mean over all batches\n", "",
       f"{NEW}swa_statistics_are_those_that_torch_estimates")
for mode, n in (("dp", 2), ("ddp", 3), ("spawn", 2)):
    mutant(f"{mode}: statistics of the average not estimated", f"train_{mode}",
           'run.save("last.pt")\n        eval_model = run.eval_model(train_loader)',
           'run.save("last.pt")\n        eval_model = average.module if average.n_averaged else net',
           f"{NEW}swa_statistics_are_the_same_in_every_mode[{mode}-{n}-{'others0' if mode == 'dp' else 'None'}]")
for mode in ("single", "dp"):
    mutant(f"{mode}: options not checked", f"train_{mode}", "    check_run(args)\n", "", f"{NEW}script_alone_checks_too[{mode}]")
mutant("ddp: options not checked", "train_ddp", "    check_run(args)\n", "",
       f"{NEW}script_alone_checks_too[ddp]")
mutant("check: in the process of the run", "machinery/check",
       "pool.submit(check, args, device_type).result()", "check(args, device_type)",
       f"{NEW}check_starts_no_thread_and_draws_no_random_number", f"{NEW}check_leaves_no_trace_in_the_state_of_the_task[single-1]")
mutant("check: switched off by another launcher", "machinery/options", '("RANK", "LOCAL_RANK")', '("RANK",)',
       "cli::test_rank_of_an_outer_launcher_does_not_switch_the_check_off[single]")
mutant("check: says what the run will say again", "machinery/check", "contextlib.redirect_stdout(io.StringIO())", "contextlib.nullcontext()",
       f"{NEW}check_is_silent")
mutant("swa: every rank evaluates its own statistics", "machinery/run",
       "        common.sync_buffers(state.average.module)\n", "",
       "survivors::test_buffers_of_an_average_are_evaluated_alike_by_eval_only[ddp]")
mutant("weights: what was trained, not the average", "common", 'average.get("n_averaged", 0) > 0', "False",
       f"{NEW}weights_of_a_checkpoint_are_its_average_once_there_is_one")
mutant("weights: an average that has not begun", "common", 'average.get("n_averaged", 0) > 0', "True",
       f"{NEW}weights_of_a_checkpoint_are_its_average_once_there_is_one")
mutant("weights: any name is a prefix", "common", "while name not in own and name.startswith(", "while name.startswith(",
       f"{NEW}prefix_that_is_a_name_of_the_model_stays")
mutant("weights: rounded to float32 first", "machinery/tasks", "task.build_model(args).to(getattr(torch, args.dtype))", "task.build_model(args)",
       f"{NEW}weights_keep_their_precision")
mutant("scaler: a skipped batch is counted", "common", ', ("num_batches_tracked",)]', "]",
       f"{ENDINGS}skipped_step_leaves_no_trace_in_batchnorm")
mutant("swa: a batch that is not finite counts", "common", "torch.where(finite, buffer, old)", "buffer",
       f"{NEW}batch_that_is_not_finite_is_left_out_of_swa_statistics[single-1]")
mutant("swa: seeded by whoever loads", "machinery/run",
       "seed_rng(self.args.seed, self.state.global_step + step, i, get_rank())", "pass",
       f"{NEW}swa_statistics_behind_dropout_do_not_depend_on_who_loads[single-1-1]")
mutant("swa: statistics in the middle of an epoch", "machinery/run",
       'self.args.average == "swa" and state.step == self.steps_per_epoch:',
       'self.args.average == "swa":', f"{NEW}interrupted_swa_goes_on_bitwise")
for mode in ("single",):
    mutant(f"{mode}: an average evaluated without its statistics", f"train_{mode}",
           "if args.eval_only:\n        eval_model = run.eval_model(train_loader)",
           "if args.eval_only:\n        eval_model = average.module if average.n_averaged else net",
           f"{NEW}evaluation_of_a_checkpoint_from_before_its_evaluation_is_that_evaluation")
mutant("load: a file is taken for none", "common", 'zipped = file.read(4) == b"PK\\3\\4"', "zipped = zipfile.is_zipfile(path)",
       f"{NEW}weights_that_do_not_fit_at_all_or_are_damaged_are_refused")
mutant("weights: NaN accepted", "common", "    if bad:\n", "    if False:\n",
       f"{NEW}weights_that_do_not_fit_at_all_or_are_damaged_are_refused")
mutant("image: the lower byte of sixteen bits", "task", 'image.mode.startswith("I")', "False",
       f"{NEW}files_that_torchvision_cannot_decode_are_read_by_pil")
JPEGS = f"{NEW}jpeg_files_are_decoded_together_and_each_as_if_alone"
mutant("images: decoded one by one", "task", "step = 16 if self.small else 1", "step = 1", JPEGS)
mutant("images: a whole batch of photographs in memory", "task", "16 if self.small else 1", "16", JPEGS)
mutant("images: one of another kind ends the run", "task", "(Exception):  # one is no", "(KeyError):  #", JPEGS)
mutant("data: a broken image in a batch ends the run", "sampling",
       "        except OSError:\n            return fetch(",
       "        except KeyError:\n            return fetch(",
       f"{NEW}broken_image_is_named_or_replaced_in_a_whole_batch_too")
mutant("tensorboard: left open", "machinery/files", "            self.writer.close()\n", "            pass\n",
       f"{NEW}tensorboard_shows_what_the_log_says[single-1]")
BY_VALUE = f"{NEW}small_tensors_of_a_worker_come_by_value"
mutant("powersgd: buckets overtake one another", "common",
       "        future.wait()  # gloo would start the all-reduces of two buckets in any order\n", "",
       f"{NEW}buckets_that_powersgd_sends_do_not_overtake_one_another")

# ------------------------------------------------------------------------------------------------------------- several nodes
TOLD, LOST_NODE = "nodes::test_ranks_that_mean_different_runs_are_told", "nodes::test_lost_node_ends_the_job_which_goes_on_later"
SEVERAL = "nodes::test_several_nodes_are_checked_before_anything_is_started"
mutant("nodes: ranks are not compared", "machinery/run",
       "        check_agreement(args, sampler.length, val_length, device)\n", "", f"{TOLD}[seed]")
mutant("nodes: evaluation sets are not compared", "machinery/run",
       "check_agreement(args, sampler.length, val_length, device)",
       "check_agreement(args, sampler.length, 0, device)", f"{TOLD}[evaluation set]")
mutant("nodes: code is not compared", "machinery/run", "path.read_bytes() for path in files",
       'b"" for path in files', f"{TOLD}[code]")
mutant("nodes: folders are compared", "machinery/options",
       'option("--output-dir", filled, "DIR", None, FREE,',
       'option("--output-dir", filled, "DIR", None, MAY_CHANGE,',
       "nodes::test_what_belongs_to_a_node_may_differ")
mutant("nodes: only one rank finds the difference", "machinery/run", 'raise by_all(f"{name} is',
       'if get_rank() > 0:\n                return\n            raise by_all(f"{name} is',
       f"{TOLD}[seed]")
mutant("nodes: who has not come is a traceback", "machinery/processes",
       'elif not dist.is_initialized() and "RANK" in os.environ and NOT_MET',
       "elif False and NOT_MET",
       "nodes::test_rank_that_cannot_start_does_not_leave_the_other_waiting", "nodes::test_spawned_ranks_whose_partners_never_come_say_so")
mutant("nodes: launchers restart ranks", "machinery/launch",
       "RESTARTS + 1 if args.nnodes == 1 else 1", "RESTARTS + 1", "defaults::test_when_the_launcher_restarts[several machines]")
mutant("nodes: gloo listens at the host's name", "machinery/rendezvous", "                if socket.inet_ntoa(answer[20:24]) == own:\n",
       "                if False:\n", f"{LOST_NODE}[run_sh-cut]")
mutant("nodes: spawned ranks listen at the host's name", "machinery/launch", "        use_interface_to(urlsplit(args.dist_url).hostname)\n", "",
       f"{LOST_NODE}[spawn-killed]")
mutant("nodes: an error of one process is nobody's absence", "machinery/processes",
       '"RANK" in os.environ and NOT_MET', "NOT_MET",
       "nodes::test_ranks_that_cannot_reach_each_other_say_so")
mutant("stop: ranks that do not save say that it was saved", "machinery/run",
       "refused = broadcast_object(self.refused)\n            step",
       "refused = self.refused\n            step",
       "nodes::test_stop_that_was_not_saved_is_not_called_saved_on_any_node")
mutant("nodes: a lost node is not called so", "machinery/launch",
       "if nnodes > 1 and {LOST, FAILED} & set(failed):", "if False:",
       "defaults::test_cause_of_a_failure_is_not_what_followed_from_it")
mutant("nodes: only the first node says why", "machinery/processes",
       'if os.environ.get("LOCAL_RANK", "0") == "0":', 'if os.environ.get("RANK", "0") == "0":',
       "nodes::test_each_node_says_why_it_ends")
mutant("nodes: a node without a number is the first", "machinery/options",
       "refuse(args.node_rank is None,", "refuse(False,",
       f"{REFUSED}[spawn-2 --nnodes 2 --dist-url tcp://localhost:2000]")
mutant("nodes: a node waits in silence", "machinery/launch",
       "            tell_place(args, args.dist_url)\n", "",
       "pitfalls_29_42::test_pitfall_40_two_launchers_are_one_job")
mutant("nodes: any address is the first node's", "machinery/rendezvous", "    if node_rank > 0:\n",
       "    if True:\n", SEVERAL, "nodes::test_url_of_the_first_node_is_checked_too")
mutant("nodes: --master-addr is not checked", "machinery/launch",
       "    if args.nnodes > 1:\n        check_address", "    if False:\n        check_address",
       SEVERAL)
mutant("nodes: a batch is cut for one node", "machinery/options",
       'world_size = here * getattr(args, "nnodes", 1)', "world_size = here", SEVERAL)
mutant("nodes: an address with a port", "machinery/options",
       'wrong = not re.fullmatch(r"[\\w.-]+", args.master_addr)', "wrong = False", SEVERAL)
mutant("nodes: the loopback is as good as any address", "machinery/rendezvous", 'if nnodes > 1 and found.startswith("127.") and', "if False and",
       "nodes::test_name_that_is_the_loopback_here_is_refused")
mutant("nodes: no way between the ranks is a traceback", "machinery/processes", "|connectFullMesh", "",
       "nodes::test_ranks_that_cannot_reach_each_other_say_so")
mutant("nodes: other nodes are to blame on one machine", "machinery/launch",
       "if nnodes > 1 and {LOST, FAILED} & set(failed):", "if {LOST, FAILED} & set(failed):",
       BLAME)
mutant("nodes: what a task put into args is compared", "machinery/run",
       "{option.name: getattr(args, option.key, None) for option in shared}", "dict(vars(args))",
       "endings::test_what_a_task_puts_into_its_arguments_does_not_spoil_the_checkpoint")

# What is unusual but right, and what cannot be right (tests/test_odd_tasks.py)
ODD = "odd_tasks::test_"
BY_DESIGN, NOISE = f"{ODD}buffers_by_design_survive_training_averages_and_saves", f"{ODD}pitfall_49_what_is_drawn_in_an_evaluation"
for mode in ("single", "dp", "ddp", "spawn"):
    n = {"single": 1, "dp": 2, "ddp": 2, "spawn": 3}[mode]
    mutant(f"{mode}: not saved before the evaluation", f"train_{mode}", '        run.save("last.pt")', "        str()",
           *([f"{ODD}interrupted_evaluation_is_made_again_and_the_same[{mode}-{n}-9]"] if mode in ("single", "ddp") else
             [f"{ODD}run_is_saved_before_each_evaluation[{mode}-{n}]"]))
    mutant(f"{mode}: evaluation not seeded", f"train_{mode}", "seed_evaluation(args.seed, i)", "str()",
           f"{ODD}evaluation_repeats_what_it_draws[{mode}-{n}]")
    mutant(f"{mode}: leaves traces in the process", f"train_{mode}", "@leaves_no_trace", "@(lambda main: main)",
           f"{ODD}every_main_leaves_no_trace")
mutant("by design: nothing is", "common", "    if before is None:\n        return True\n    before", "    return True\n    before",
       f"{BY_DESIGN}[none-single-1]", f"{ODD}became_non_finite_compares_place_by_place")
mutant("by design: the whole tensor", "common", "return not (value.isfinite() | (value == before) |", "return not (before.isfinite().logical_not().any() |",
       f"{ODD}became_non_finite_compares_place_by_place")
mutant("by design: NaN becomes infinite", "common", "| (value.isnan() & before.isnan())", "| before.isnan()",
       f"{ODD}became_non_finite_compares_place_by_place")
mutant("by design: a NaN is not", "common", " | (value.isnan() & before.isnan())", "",
       f"{ODD}became_non_finite_compares_place_by_place")
mutant("by design: no weights with a mask", "common",
       "became_non_finite(value.to(own[n].dtype), own[n])",
       "became_non_finite(value.to(own[n].dtype), None)",
       f"{ODD}weights_with_values_by_design_are_loaded")
mutant("by design: judged in the precision of the file", "common",
       "became_non_finite(value.to(own[n].dtype), own[n])", "became_non_finite(value, own[n])",
       "data_and_models::test_weights_keep_their_precision")
mutant("by design: taken from the end of the run", "machinery/files",
       "became_non_finite(v, self.by_design.get(name))", "became_non_finite(v, v)",
       f"{ODD}what_became_non_finite_is_never_saved_and_the_run_does_not_end_well[single-1]")
mutant("save: a run that could not be saved ends well", "machinery/run",
       "        if refused:\n            raise", "        if False:\n            raise",
       f"{ODD}what_became_non_finite_is_never_saved_and_the_run_does_not_end_well[single-1]")
mutant("save: the other ranks end well", "machinery/run",
       "refused = broadcast_object(self.refused)\n        if dist",
       "refused = self.refused\n        if dist",
       f"{ODD}ranks_of_a_run_that_could_not_be_saved_end_alike")
mutant("save: a refused score is the best", "machinery/run", "state.best = earlier", "pass",
       f"{ODD}refused_save_does_not_raise_the_best_score")
mutant("ema: all buffers averaged", "common", "super().__init__(net, multi_avg_fn=fading)",
       "super().__init__(net, multi_avg_fn=fading, use_buffers=True)",
       f"{ODD}ema_averages_parameters_and_statistics_and_copies_the_rest")
mutant("ema: the variance is a copy", "common", "for buffer in (norm.running_mean, norm.running_var)", "for buffer in (norm.running_mean,)",
       f"{ODD}ema_averages_parameters_and_statistics_and_copies_the_rest")
mutant("ema: statistics forget twice as slowly", "common", "self.statistics, 1 - self.decay)", "self.statistics, (1 - self.decay) / 2)",
       f"{ODD}ema_averages_parameters_and_statistics_and_copies_the_rest")
mutant("ema: the first statistics count a hundredth", "common", "started = int(self.n_averaged) > 0",
       "started = True", f"{ODD}ema_averages_parameters_and_statistics_and_copies_the_rest")
MORE_EPOCHS = f"{ODD}swa_with_more_epochs_averages_what_a_run_of_that_length_averages"
mutant("swa: an average that begins too early is kept", "machinery/run",
       "state.average.n_averaged.zero_()", "pass", f"{MORE_EPOCHS}[4-12]")
mutant("swa: averages that are lost are not missed", "machinery/files", "if wanted in (0, found):",
       "if True:", f"{ODD}swa_refuses_epochs_whose_average_is_lost")
mutant("swa: names an epoch too low", "machinery/files", "math.ceil(4 * done / 3)", "4 * done // 3 - 1", f"{ODD}swa_refuses_epochs_whose_average_is_lost")
WRAPPED = f"{ODD}pitfall_48_wrapped_data_set_is_augmented_anew_in_every_epoch"
mutant("wrapped: wrappers hide the epoch", "sampling", "waiting += _like_datasets(value)",
       "waiting += []", f"{WRAPPED}[False-subset]")
mutant("wrapped: many attributes hide the epoch", "sampling", "for value in getattr(one, \"__dict__\", {}).values()",
       "for value in [list(getattr(one, \"__dict__\", {}).values())]", f"{ODD}data_sets_with_epochs_finds_each_once_and_ends")
mutant("wrapped: only the first of several is told", "sampling", "found for one in inner for",
       "found for one in list(inner)[:1] for",
       f"{ODD}data_sets_with_epochs_finds_each_once_and_ends")
mutant("wrapped: dictionaries hide the epoch", "sampling", "(list, tuple, dict)", "(list, tuple)",
       f"{WRAPPED}[False-own]")
mutant("wrapped: a circle has no end", "sampling", "        seen.add(id(one))\n", "", f"{ODD}data_sets_with_epochs_finds_each_once_and_ends")
mutant("evaluation: ranks draw alike", "sampling", "i * world_size + rank)  # no", "i)  # no", f"{NOISE}_is_the_same_in_every_mode[ddp-2]")
mutant("evaluation: seeds of training", "sampling", "seed_rng(seed, -1, i *", "seed_rng(seed, 0, i *",
       f"{ODD}seeds_of_an_evaluation_are_no_seeds_of_training")
mutant("evaluation: batches depend on the world size", "sampling", "math.ceil(length / 8))", "math.ceil(length / 8 / world_size))",
       f"{ODD}evaluation_batches_are_the_same_at_every_world_size")
mutant("evaluation: one rank has it all", "sampling", "min(batch_size, math.ceil(length / 8))", "batch_size",
       f"{ODD}evaluation_batches_are_the_same_at_every_world_size")
mutant("evaluation: batches without a limit", "machinery/options", "min(128, args.batch_size // args.accum_steps)", "args.batch_size // args.accum_steps",
       f"{ODD}evaluation_batch_is_a_micro_batch_of_at_most_128_unless_it_is_said")
mutant("evaluation: batches of a whole step", "machinery/options", "min(128, args.batch_size // args.accum_steps)", "min(128, args.batch_size)",
       f"{ODD}evaluation_batch_is_a_micro_batch_of_at_most_128_unless_it_is_said")
for generator in ("random.seed(bits)", "np.random.seed(bits % 2**32)", "torch.default_generator.manual_seed(bits)"):
    mutant(f"seeds: without {generator}", "sampling", f"    {generator}\n", "", f"{ODD}seeds_of_an_evaluation_are_no_seeds_of_training")
mutant("stop: forgotten after an evaluation", "machinery/run",
       "self.stop.agreed(wait=True) if state.epoch < args.epochs else None", "None",
       f"{ENDINGS}signal_during_an_evaluation_finds_the_run_saved_and_stops_it_after_the_evaluation[single-1]")
mutant("stop: after an evaluation only what was agreed before", "machinery/run", "agreed = self.pending if wait else earlier", "agreed = earlier",
       f"{ENDINGS}signal_during_an_evaluation_finds_the_run_saved_and_stops_it_after_the_evaluation[ddp-2]")
mutant("stop: a run that is done is called stopped", "machinery/run",
       "self.stop.agreed(wait=True) if state.epoch < args.epochs else None",
       "self.stop.agreed(wait=True)", f"{ENDINGS}signal_in_the_last_evaluation_lets_the_run_end")
mutant("eval-only: writes into the log of a run", "machinery/files",
       'if args.eval_only and any(self.directory.glob("*.pt")):', "if False:",
       f"{ODD}eval_only_does_not_touch_the_log_of_a_run")
mutant("eval-only: never writes a line", "machinery/files",
       'if args.eval_only and any(self.directory.glob("*.pt")):', "if args.eval_only:",
       f"{ODD}eval_only_does_not_touch_the_log_of_a_run")
mutant("resume: best.pt stays behind", "machinery/files",
       'save_checkpoint(load_checkpoint(name), self.directory / "best.pt")', "str()",
       f"{ODD}resume_in_another_folder_takes_best_along")
mutant("resume: any best.pt will do", "machinery/files", 'if found["best"] == best:',
       'if found["best"] is not None:',
       f"{ODD}resume_of_an_earlier_checkpoint_does_not_take_a_later_best")
mutant("resume: a best score without its file", "machinery/files", 'checkpoint["best"] = None  # the', 'str()  # the',
       f"{ODD}best_pt_that_was_deleted_is_written_anew")
mutant("check: lazy modules pass", "machinery/check", "if lazy := [", "if lazy := [] and [", f"{ODD}task_that_cannot_be_right_is_refused_before_the_run[lazy]")
mutant("check: complex numbers pass", "machinery/check", "if names := [", "if names := [] and [",
       f"{ODD}task_that_cannot_be_right_is_refused_before_the_run[complex]")
mutant("check: complex buffers pass", "machinery/check", "[*net.named_parameters(), *net.named_buffers()]", "net.named_parameters()",
       f"{ODD}task_that_cannot_be_right_is_refused_before_the_run[complex_buffer]")
mutant("check: names of metrics are not compared", "machinery/check", "if first and (problem",
       "if False and (problem",
       f"{ODD}task_that_cannot_be_right_is_refused_before_the_run[last_lacks]")
mutant("meter: a new name is welcome", "common",
       "if self.sums and (problem := different_names(values",
       "if False and (problem := different_names(values",
       f"{ODD}metric_of_some_batches_alone_ends_the_run[single-1]")
mutant("meter: names of other ranks are dropped", "common",
       "if self.sums and (problem := different_names(self.sums",
       "if False and (problem := different_names(self.sums",
       f"{ODD}names_that_one_rank_alone_has_are_an_error_and_an_empty_rank_is_none")
mutant("options: --image-size without effect", "task", "if args.image_size and args.dataset not in", "if False and args.dataset not in",
       f"{ODD}image_size_without_effect_is_refused[digits-folder0]")
mutant("options: PowerSGD under a changing scale", "machinery/options", 'refuse(wrong, f"{powersgd}',
       'refuse(False, f"{powersgd}', f"{ODD}power_sgd_with_a_changing_scale_is_refused")
for name in ("error_dict", "p_memory_dict"):
    mutant(f"powersgd: {name} keeps a NaN", "common", f"state.{name}, state", "state", f"{ODD}power_sgd_forgets_a_nan")
mutant("powersgd: nothing is forgotten", "common", "if bucket.index() == 0 and scaler.in_a_row > 0:", "if False:", f"{ODD}power_sgd_forgets_a_nan")
mutant("cyclic: the warm-up passes the start", "common", "return factor * (step + 1) / start if",
       "return (step + 1) / start if", f"{ODD}cyclic_schedule_has_no_cliff")
mutant("cyclic: begins with the warm-up", "common", "((step - start) % cycle)", "(step % cycle)",
       f"{ODD}cyclic_schedule_has_no_cliff")
mutant("cyclic: one cycle ends after the run", "common",
       "marks[0] if marks else max(1, end - start)", "marks[0] if marks else end",
       f"{ODD}cyclic_schedule_has_no_cliff")
mutant("ends: a rank leaves before the others know", "machinery/run",
       'return Stopped(2, f"error: {message}") if dist.is_initialized() else UsageError(message)',
       "return UsageError(message)", f"{ENDINGS}early_end_of_all_ranks_waits_for_all")
TRACES = f"{ODD}main_can_be_called_from_a_notebook_or_a_thread_and_leaves_no_trace"
for name, old, new in (
    ("nothing is put back", "            at_end.close()\n", ""),
    ("handlers stay", "at_end.callback(signal.signal, number,", "str("),
    ("a thread sets handlers", "if threading.current_thread() is not threading.main_thread():", "if False:"),
    ("variables stay", "            os.environ.clear()\n            os.environ.update(environment)\n", ""),
    ("new variables stay", "            os.environ.clear()\n", ""),
    ("signals that were blocked come through", "            signal.pthread_sigmask(signal.SIG_SETMASK, mask)\n", ""),
    ("threads stay", "            torch.set_num_threads(threads)\n", ""),
    ("deterministic kernels stay", "            torch.use_deterministic_algorithms(strict, warn_only=warn_only)\n", ""),
    ("deterministic kernels come back strict", "strict, warn_only=warn_only)", "strict)"),
    ("benchmark stays", "            torch.backends.cudnn.benchmark = benchmark\n", ""),
    ("Python's generator stays seeded", "            random.setstate(python)\n", ""),
    ("numpy's generator stays seeded", "            np.random.set_state(numpy)\n", ""),
    ("torch's generator stays seeded", ", torch.random.fork_rng(devices=[]):", ":"),
):
    mutant(f"traces: {name}", "machinery/processes", old, new, TRACES)
mutant("traces: the lock stays", "machinery/files",
       "        at_end.callback(lambda: log() and log().close())\n", "",
       f"{ODD}main_can_go_on_where_a_stop_ended_it")
mutant("average: infinite parameters become NaN", "common", "for i in self.infinite:", "for i in ():",
       f"{ODD}average_of_parameters_that_are_infinite_by_design[ema]")
mutant("average: a parameter with an infinity is a copy", "common",
       "torch.where(finite, averages[i], parameters[i])", "parameters[i]",
       f"{ODD}average_of_parameters_that_are_infinite_by_design[swa]")
mutant("resume: last.pt before best.pt", "machinery/files",
       "if best is not None and not self._has_best", "if False and not self._has_best",
       f"{ODD}best_is_in_the_new_folder_before_last")
mutant("stop: SLURM's warning ends well although nothing was saved", "machinery/run",
       "SIGNALS[self.stopping] or int(bool(refused))", "SIGNALS[self.stopping]",
       f"{ODD}warning_of_slurm_ends_with_1_if_the_run_could_not_be_saved")
EPOCH_ONCE = f"{ODD}set_epoch_is_called_once_an_epoch_and_seeded"
mutant("wrapped: told in every batch", "sampling", 'if getattr(dataset, "_epoch_told", None) != epoch:', "if True:", EPOCH_ONCE)
mutant("wrapped: set_epoch is not seeded", "sampling",
       "                seed_generators(splitmix64(self.seed, epoch))\n", "", EPOCH_ONCE)
mutant("wrapped: names that are passed on count", "sampling", "hasattr(type(dataset), \"__getitems__\")", "hasattr(dataset, \"__getitems__\")",
       f"{ODD}wrapper_that_passes_names_on_is_asked_itself")
mutant("wrapped: classes are taken for data sets", "sampling", "isinstance(value, (Tensor, type))",
       "isinstance(value, Tensor)", f"{ODD}data_sets_with_epochs_finds_each_once_and_ends")
# ---------------------------------------------------------------------------------------------------------------- run.sh, plot.py

HALF_MADE = "run_sh::test_half_made_environment_is_made_anew"
NO_ENSUREPIP = "run_sh::test_python_without_ensurepip_is_told_what_to_install"
NUMBER = "run_sh::test_number_of_devices_is_n_or_the_option_or_the_default"
SHIM = "run_sh::test_python_that_a_shim_picks_in_the_users_folder_is_used_for_everything"
mutant("run.sh: any environment that has Python is whole", "run.sh",
       """! in_here -c 'import importlib.metadata as m; raise SystemExit(not m.files("pip"))' 2>/dev/null""",
       "[[ ! -x $python ]]", HALF_MADE)
mutant("run.sh: an environment that has half of pip is whole", "run.sh", 'not m.files("pip")', 'not m.version("pip")', HALF_MADE)
mutant("run.sh: what is half-made is kept", "run.sh", "-m venv --clear", "-m venv", HALF_MADE)
mutant("run.sh: a whole environment is made anew too", "run.sh", 'raise SystemExit(not m.files("pip"))', "raise SystemExit(1)", HALF_MADE)
mutant("run.sh: goes on without ensurepip", "run.sh", "'import ensurepip, venv' 2>/dev/null", "'import venv' 2>/dev/null", NO_ENSUREPIP)
mutant("run.sh: a link is taken for the project", "run.sh", 'readlink -f -- "', 'realpath -s -- "',
       "run_sh::test_link_to_run_sh_uses_the_folder_of_the_project")
mutant("run.sh: a shim is asked again and again", "run.sh", """python=$("$found" -I -c 'import sys; print(sys.executable)')""",
       "python=$found", SHIM)
mutant("run.sh: a shim is asked in the project", "run.sh", 'python=$("$found"', 'python=$(cd -- "$here" && "$found"', SHIM)
mutant("run.sh: dp without N has two replicas", "run.sh", '${devices:+--replicas "$devices"}', '--replicas "${devices:-2}"', NUMBER)
mutant("run.sh: spawn without N has two processes", "run.sh", '${devices:+--nproc "$devices"}', '--nproc "${devices:-2}"', NUMBER)
mutant("run.sh: spawn forgets N", "run.sh", '${devices:+--nproc "$devices"}', "", NUMBER)
mutant("devices: all cores for every process beside an accelerator", "machinery/processes", 'if "OMP_NUM_THREADS" not in os.environ:',
       'if device_type == "cpu" and "OMP_NUM_THREADS" not in os.environ:',
       LAST + "38_workers_stay_and_cores_are_divided")
mutant("launch: a group without a default backend", "machinery/rendezvous", 'return "gloo"  #', 'return "cpu:gloo"  #',
       "endings::test_group_on_the_cpu_has_a_default_backend_in_every_version")
mutant("plot: negative losses on a logarithmic axis", "tools/plot", "if name in LOGARITHMIC and positive", "if name in LOGARITHMIC",
       "plot::test_axis_is_logarithmic_only_where_all_values_of_all_runs_are_positive")
mutant("plot: only the last run counts", "tools/plot", "positive = positive and all(", "positive = all(",
       "plot::test_axis_is_logarithmic_only_where_all_values_of_all_runs_are_positive")
