"""Mutants of programs of tools/."""

from mutants_base import mutant

# One fault takes two or three lines here, and not seven.
# fmt: off

# --------------------------------------------------------------------------------------------------------------------------- tools/bench.py

ROW, PROCESSES, TURN = "test_row_of_one_device", "test_row_of_several_processes", "test_turns_time_only_the_steps_that_count"
mutant("bench: the mean turn", "tools/bench", "middle = {name: median(times)", "middle = {name: mean(times)", ROW)
mutant("bench: the fastest turn", "tools/bench", "middle = {name: median(times)", "middle = {name: min(times)", ROW)
mutant("bench: ratios upside down", "tools/bench", "ratios = [bare / script for", "ratios = [script / bare for", ROW)
mutant("bench: ratio of the medians", "tools/bench", '{"ratio": median(ratios),', '{"ratio": middle["bare"] / middle["script"],', ROW)
mutant("bench: range upside down", "tools/bench", '"ratio_min": min(ratios), "ratio_max": max(ratios)', '"ratio_min": max(ratios), "ratio_max": min(ratios)',
       ROW)
mutant("bench: the smallest process", "tools/bench", 'max(rank["peak_mib"] for', 'min(rank["peak_mib"] for', PROCESSES)
mutant("bench: memory of the smallest device", "tools/bench", 'max((rank["device_mib"] for', 'min((rank["device_mib"] for', PROCESSES)
SIZES = "test_each_batch_size_has_a_row_in_the_given_precision"
mutant("bench: batch size ignored", "tools/bench", 'words += f" --batch-size {size}" * bool(size)', "pass", SIZES)
mutant("bench: precision ignored", "tools/bench", '" --amp {amp}" + ', '', SIZES)
mutant("bench: memory format ignored", "tools/bench", '" --amp {amp}" + " --channels-last" * args.channels_last', '" --amp {amp}"', SIZES)
mutant("bench: bare loop in float32", "tools/bench", "with autocast(run.device, args.amp):", 'with autocast(run.device, "off"):',
       "test_bare_loop_has_the_precision_of_the_script[bf16]")
mutant("bench: bytes of rank 0", "tools/bench", 'mean(rank["bytes_sent"] for rank in ranks)', 'ranks[0]["bytes_sent"]', PROCESSES)
mutant("bench: bytes of all ranks", "tools/bench", 'mean(rank["bytes_sent"] for rank in ranks)', 'sum(rank["bytes_sent"] for rank in ranks)', PROCESSES)
mutant("bench: replicas send", "tools/bench", "ring_bytes(gradient_bytes, n)", "ring_bytes(gradient_bytes, devices)", "test_row_of_replicas")
mutant("bench: latency in ms", "tools/bench", "args.latency * 1e-6", "args.latency * 1e-3", ROW)
mutant("bench: bandwidth in bits", "tools/bench", "args.bandwidth * 1e9", "args.bandwidth * 1e9 / 8", ROW)
mutant("bench: efficiency of the script", "tools/bench", 'predict(middle["bare"], gradient_bytes, many', 'predict(middle["script"], gradient_bytes, many',
       ROW)
mutant("bench: latency is in the bandwidth", "tools/bench", 'middle["many"] - middle["few"]', 'middle["many"]', PROCESSES)
mutant("bench: latency of one message too many", "tools/bench", 'middle["few"] / (2 * n - 2)', 'middle["few"] / (2 * n)', PROCESSES)
mutant("bench: predicted from the step with its all-reduce", "tools/bench", 'predict(middle["alone"]', 'predict(middle["bare"]', PROCESSES)
mutant("bench: predicted by the tree", "tools/bench", '**link)["ring"]', '**link)["tree"]', PROCESSES)
mutant("bench: the script's step is the measured one", "tools/bench", '"measured": middle["bare"]', '"measured": middle["script"]', PROCESSES)
mutant("bench: each process has all cores", "tools/bench", "str(max(1, CORES // n))", "str(CORES)", PROCESSES)
mutant("bench: the turn that warms up counts", "tools/bench", "* (turn > 0)", "* (turn >= 0)", TURN)
mutant("bench: settling counts", "tools/bench", "if i == SETTLE:", "if i == 0:", TURN)
mutant("bench: seconds of a window", "tools/bench", "return (time.perf_counter() - start) / steps", "return time.perf_counter() - start", TURN)
mutant("bench: settling steps in the mean", "tools/bench", "return (time.perf_counter() - start) / steps",
       "return (time.perf_counter() - start) / (SETTLE + steps)", TURN)
mutant("bench: bytes of the timed steps only", "tools/bench", "(bytes_sent() - before) / (SETTLE + steps)", "(bytes_sent() - before) / steps", TURN)
mutant("bench: gradient of frozen parameters", "tools/bench", "for p in run.state.net.parameters() if p.requires_grad]", "for p in run.state.net.parameters()]",
       TURN)
mutant("bench: bare loop sums its losses", "tools/bench", "/ args.batch_size\n    model", "/ 1\n    model",
       "test_bare_loop_makes_the_step_of_the_script[single]")
mutant("bench: bare loop trains the script's network", "tools/bench", "copy.deepcopy(run.state.net)", "run.state.net",
       "test_bare_loop_makes_the_step_of_the_script[single]")
mutant("bench: one device is N", "tools/bench", 'share = 1 if args.kind == "cpu" else row["devices"]', "share = 1",
       "test_accelerators_share_nothing")
TABLE = "test_table_shows_each_row_and_its_share_of_one_device"
mutant("bench: cores are devices", "tools/bench", 'share = 1 if args.kind == "cpu" else row["devices"]', 'share = row["devices"]', TABLE)
mutant("bench: scaled by the bare loop", "tools/bench", 'row["script"] / one', 'row["bare"] / one', TABLE)
mutant("bench: MiB for MB", "tools/bench", 'row["bytes_formula"] / 1e6,', 'row["bytes_formula"] / 2**20,', TABLE)
mutant("bench: columns swapped", "tools/bench", 'f"{row[\'bare\']:.0f}", f"{row[\'script\']:.0f}"]', 'f"{row[\'script\']:.0f}", f"{row[\'bare\']:.0f}"]', TABLE)
mutant("bench: exit code of a failed worker", "tools/bench", "code, words = codes[index],", "code, words = 1,",
       "test_failing_worker_is_told_by_the_last_line_of_its_log")
mutant("bench: a worker that lost another is blamed", "tools/bench", "if codes[index] == LOST:", "if False:",
       "test_failing_worker_is_told_by_the_last_line_of_its_log")

# --------------------------------------------------------------------------------------------------------------------------- tools/peers.py

ROWS, TURNS = "test_rows_of_programs_by_hand", "test_programs_take_turns_with_the_same_options"
TIMED = "test_steps_of_any_program_are_timed_from_its_command_and_it_is_ended"
HANGS = "test_program_that_hangs_is_ended_with_what_it_has_started"
mutant("peers: steps that settle count", "tools/peers", "itertools.pairwise(run[SETTLE:])", "itertools.pairwise(run)", ROWS)
mutant("peers: the fastest step", "tools/peers", "[median(seconds) for", "[min(seconds) for", ROWS)
mutant("peers: start-up of the last step", "tools/peers", "[run[0] for run in runs]", "[run[-1] for run in runs]", ROWS)
mutant("peers: ratios upside down", "tools/peers", "ratios = [a / b for", "ratios = [b / a for", ROWS)
mutant("peers: ratio of the medians", "tools/peers", "median(ratios) if", "median(ours[kind]) / median(row[kind]) if", ROWS)
mutant("peers: the turn that warms up counts", "tools/peers", "[found] * (turn > 0)", "[found] * (turn >= 0)", TURNS)
mutant("peers: each process has all cores", "tools/peers", "os.environ.get('OMP_NUM_THREADS', str(share))".replace("'", '"'), "str(len(os.sched_getaffinity(0)))", TURNS)
mutant("peers: this project has other workers", "tools/peers", 'str(ROOT / f"train_{mode}.py"), *argv]', 'str(ROOT / f"train_{mode}.py"), *argv[:-2]]', TURNS)
mutant("peers: one directory for all", "tools/peers", "str(next(number))", 'str(number and "0")', TURNS)
mutant("peers: workers for data in memory", "tools/peers", 'if "imagefolder" in argv else 0', "", "test_start_up_is_one_step_and_data_in_memory_need_no_workers")
mutant("peers: start-up takes all steps", "tools/peers", "1 if args.startup else 1 + SETTLE", "1 + SETTLE",
       "test_start_up_is_one_step_and_data_in_memory_need_no_workers")
mutant("peers: seconds for ms", "tools/peers", '(1000 if kind == "step" else 1)', "1", "test_table_of_peers")
mutant("peers: a program is compared with itself", "tools/peers", ' or row["program"] == name', "", "test_table_of_peers")
mutant("peers: ranks of a launcher around all", "tools/peers", "for name, value in os.environ.items() if name not in OF_RANKS", "for name, value in os.environ.items()",
       TIMED)
mutant("peers: seconds since the machine started", "tools/peers", "float(line) - start", "float(line)", TIMED)
mutant("peers: what a program has started lives on", "tools/peers", "os.killpg(process.pid, number)", "process.send_signal(number)", HANGS)
mutant("peers: who ignores SIGTERM lives on", "tools/peers", "(signal.SIGTERM, signal.SIGKILL)", "(signal.SIGTERM,)", HANGS)
mutant("peers: the first line of a failure", "tools/peers", '.split("\\n")[-1]', '.split("\\n")[0]', "test_program_that_ends_too_soon_is_told_by_its_last_line")
mutant("peers: all are installed", "tools/peers", "if package and not importlib", "if False and not importlib", "test_peer_that_is_not_installed_is_named_with_its_command")
mutant("peers: files are copies", "tools/peers", "os.link(path, ", '__import__("shutil").copy(path, ', "test_directory_of_many_files_is_made_of_links_to_a_few")
mutant("peers: workers live on", "tools/peers/sitecustomize", "worker.kill()", "pass", TIMED)
mutant("peers: ranks need not meet", "tools/peers/sitecustomize", "dist.barrier()", "pass", "test_ranks_that_have_never_met_are_an_error")
mutant("peers: the step of a check counts", "tools/peers/sitecustomize", "if os.getpid() != self.process:", "if False:",
       "test_step_that_a_fork_tries_is_none_of_the_program")
SHARE = "test_ranks_of_a_peer_share_each_batch_and_have_equal_weights[plain-ddp]"
mutant("peers: gradients are not averaged", "tools/peers/train_plain", "model = DistributedDataParallel(model)", "pass", SHARE)
mutant("peers: each rank takes a whole batch", "tools/peers/train_plain", "args.batch_size // ranks", "args.batch_size", SHARE)

# ---------------------------------------------------------------------------------------------------------------------------- tools/plot.py

mutant("plot: negative losses on a logarithmic axis", "tools/plot", "if name in LOGARITHMIC and positive", "if name in LOGARITHMIC",
       "test_axis_is_logarithmic_only_where_all_values_of_all_runs_are_positive")
mutant("plot: only the last run counts", "tools/plot", "positive = positive and all(", "positive = all(",
       "test_axis_is_logarithmic_only_where_all_values_of_all_runs_are_positive")
mutant("plot: counts are drawn", "tools/plot",
       '"global_step", "count", "train_s"',
       '"global_step", "train_s"',
       "test_axes_panels_and_lines")
mutant("plot: four columns", "tools/plot",
       "columns = min(3, len(panels))",
       "columns = min(4, len(panels))",
       "test_axes_panels_and_lines")
mutant("plot: all lines of one width", "tools/plot",
       "width = 1 + 5 *",
       "width = 1 + 0 *",
       "test_axes_panels_and_lines")
mutant("plot: a single point is not seen", "tools/plot",
       'marker="." if len(points) < 3 else ""',
       'marker=""',
       "test_axes_panels_and_lines")
mutant("plot: events mixed", "tools/plot",
       'if line["event"] == event and line.get(name) is not None]',
       "if line.get(name) is not None]",
       "test_axes_panels_and_lines")
mutant("plot: empty panels stay", "tools/plot",
       "        axis.remove()\n",
       "        pass\n",
       "test_axes_panels_and_lines")
mutant("plot: any suffix", "tools/plot",
       'args.output.suffix not in (".svg", ".png", ".pdf") or',
       "",
       "test_picture_that_cannot_be_written_is_refused")
mutant("plot: loss on a linear axis", "tools/plot", '"log" if name in LOGARITHMIC and positive else "linear"', '"linear"',
       "test_axes_panels_and_lines")

# ------------------------------------------------------------------------------------------------------------------------ tools/pictures.py

mutant("pictures: absolute differences", "tools/pictures", "for name in theirs) / largest)", "for name in theirs) / 1)", "test_deviation_by_hand")
mutant("pictures: the smallest tensor decides", "tools/pictures", "largest = max(tensor.abs().max()", "largest = min(tensor.abs().max()",
       "test_deviation_by_hand")
mutant("pictures: the batch is not accumulated", "tools/pictures", "BATCH, 0, PIECES, False, rank", "BATCH, 0, 1, False, rank",
       "test_slices_in_the_picture_are_those_of_the_samplers")
mutant("task: a checkpoint of float64 does not fit its images", "task", "    return model.to(dtype)", "    return model",
       "test_model_is_built_in_the_precision_of_its_run[float64]")
mutant("pictures: shards of the whole", "tools/pictures", '(kind, 1 / n, False)', '(kind, 1.0, False)',
       "test_memory_in_the_picture_is_what_was_measured")
mutant("pictures: copies of dp stay", "tools/pictures", '[("parameters", 1.0, True), ("gradients", 1.0, True), own]',
       '[("parameters", 1.0, False), ("gradients", 1.0, False), own]', "test_checked_in_drawings_are_those_of_today")
