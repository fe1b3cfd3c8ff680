"""Mutants of options, the check before a run, tasks, and the stand-ins."""

from mutants_base import EQUAL, MASKS, REFUSED, SEVERAL, SYNC_BN, mutant

# One fault takes two or three lines here, and not seven.
# fmt: off

# --------------------------------------------------------------------------------------------------------------------- machinery/options.py

mutant("resume: another seed counts as harmless", "machinery/options", '2**63 - 1), "N", 0, FIXED', '2**63 - 1), "N", 0, MAY_CHANGE',
       "test_changed_option_that_would_change_the_run_is_refused_by_name[--seed 1]")
mutant("slurm: tasks that each have a device are too many", "machinery/options", " and not by_srun", "",
       "test_more_processes_than_accelerators_is_refused")
mutant("restart: refused because its folder holds a run", "machinery/options",
       "and not attempt() and", "and", "test_restarted_process_goes_on_or_begins_anew")
mutant("options: batch size not compared with devices", "machinery/options",
       "refuse(args.batch_size < least,", "refuse(False,", f"{REFUSED}[ddp-65 ]")
mutant("options: accumulation not counted", "machinery/options",
       "least = world_size * args.accum_steps", "least = world_size",
       f"{REFUSED}[single-1 --accum-steps 65]")
mutant("options: --local_rank unknown", "machinery/options",
       '[option.name, "--local_rank"] if', "[option.name] if",
       "test_local_rank_is_accepted_in_both_spellings[--local_rank=3]")
mutant("options: booleans cannot be turned off", "machinery/options", "argparse.BooleanOptionalAction", '"store_true"',
       "test_booleans_can_be_turned_off_and_help_is_readable[single]")
mutant("options: no other choice is proposed", "machinery/options", "known = choices or self._option_string_actions", "known = self._option_string_actions",
       f"{REFUSED}[single-1 --dataset cifar]")
mutant("task: no other model is proposed", "task", "args.model.lower(), fitting, 1)", "args.model.lower(), [], 1)", f"{REFUSED}[single-1 --model resnet81]")
mutant("task: a model for other channels is proposed", "task", "*(known if channels == 3 else ())", "*known", f"{REFUSED}[single-1 --model resnet81]")
mutant("task: no other model of its own is proposed", "task", "[*BUILT_IN, *(known if", "[*(known if", f"{REFUSED}[single-1 --model DigitNet]")
mutant("options: abbreviations accepted", "machinery/options", "description=start, allow_abbrev=False",
       "description=start, allow_abbrev=True", f"{REFUSED}[single-1 --batch 32]")
mutant("options: infinity is a number", "machinery/options", "or not math.isfinite(value)", "", f"{REFUSED}[single-1 --lr inf]")
mutant("options: a run is overwritten", "machinery/options", "refuse(taken,", "refuse(False,",
       f"{REFUSED}[single-1 --output-dir TMP/run]")
mutant("options: more processes than accelerators", "machinery/options", "here > available and",
       "False and", "test_more_processes_than_accelerators_is_refused")
mutant("options: sync-bn in data parallel", "machinery/options",
       'wrong = mode == "dp" and args.sync_bn', "wrong = False", f"{REFUSED}[dp-2 --sync-bn]")
mutant("options: fp16 and float64 together", "machinery/options", "refuse(both,", "refuse(False,",
       f"{REFUSED}[single-1 --amp fp16 --dtype float64]")
mutant("balanced: not resumed as such", "machinery/options", 'flag("--balanced", FIXED,',
       'flag("--balanced", MAY_CHANGE,',
       "test_changed_option_that_would_change_the_run_is_refused_by_name[--balanced]")
mutant("check: switched off by another launcher", "machinery/options", '("RANK", "LOCAL_RANK")', '("RANK",)',
       "test_rank_of_an_outer_launcher_does_not_switch_the_check_off[single]")
mutant("nodes: folders are compared", "machinery/options",
       'option("--output-dir", filled, "DIR", None, FREE,',
       'option("--output-dir", filled, "DIR", None, MAY_CHANGE,',
       "test_what_belongs_to_a_node_may_differ")
mutant("nodes: a node without a number is the first", "machinery/options",
       "(args.node_rank is None or not address)", "not address",
       f"{REFUSED}[spawn-2 --nnodes 2 --dist-url tcp://localhost:2000]")
mutant("nodes: a batch is cut for one node", "machinery/options",
       'world_size = here * getattr(args, "nnodes", 1)', "world_size = here", SEVERAL)
mutant("nodes: several without an address", "machinery/options",
       "(args.node_rank is None or not address)", "args.node_rank is None", SEVERAL)
mutant("nodes: an address without several", "machinery/options",
       'given = args.node_rank is not None or (mode in LAUNCHED and address)', "given = args.node_rank is not None", SEVERAL)
mutant("nodes: an address with a port", "machinery/options", 'like(r"[\\w.-]+"', 'like(r"[\\w.:-]+"', SEVERAL)
URL = 'like(r"tcp://[^:/]+:[1-9][0-9]{0,4}"'
mutant("nodes: a URL of any kind", "machinery/options", URL, 'like(r".+"',
       f"{REFUSED}[spawn-2 --dist-url localhost]")
mutant("nodes: a URL without a port", "machinery/options", URL, 'like(r"tcp://[^/]+"',
       "test_pitfall_40_unusable_address_is_an_error[tcp://127.0.0.1]")
mutant("options: what follows the pattern is not looked at", "machinery/options", "re.fullmatch(pattern, text)", "re.match(pattern, text)", SEVERAL)
mutant("options: an unset variable is a value", "machinery/options", r'like(r"(?s)\s*\S.*"', r'like(r"(?s).*"', f"{REFUSED}[single-1 --task=]")
mutant("evaluation: batches without a limit", "machinery/options", "min(128, args.batch_size // args.accum_steps)", "args.batch_size // args.accum_steps",
       "test_evaluation_batch_is_a_micro_batch_of_at_most_128_unless_it_is_said")
mutant("evaluation: batches of a whole step", "machinery/options", "min(128, args.batch_size // args.accum_steps)", "min(128, args.batch_size)",
       "test_evaluation_batch_is_a_micro_batch_of_at_most_128_unless_it_is_said")
mutant("options: PowerSGD under a changing scale", "machinery/options", 'wrong = args.grad_compress == "powersgd" and args.amp == "fp16"',
       "wrong = False", "test_power_sgd_with_a_changing_scale_is_refused")
TOO_LONG = "--output-dir TMP/" + "long" * 99
mutant("options: a name that is too long is a traceback", "machinery/options", "except OSError as error:", "except KeyError as error:",
       f"{REFUSED}[single-1 {TOO_LONG[:99]}]")
mutant("nodes: port 29501", "machinery/options",
       '"PORT", 29500',
       '"PORT", 29501',
       "test_port_of_several_nodes")
mutant("check: a read-only folder", "machinery/options",
       "os.access(folder, os.W_OK | os.X_OK)",
       "True",
       "test_bad_input_is_refused_by_name")
mutant("default: --epochs", "machinery/options",
       '"--epochs", positive, "N", 30,',
       '"--epochs", positive, "N", 20,',
       "test_defaults")
mutant("default: --batch-size", "machinery/options",
       '"--batch-size", positive, "N", 64,',
       '"--batch-size", positive, "N", 32,',
       "test_defaults")
mutant("default: --lr", "machinery/options",
       '"--lr", amount, "X", 0.1,',
       '"--lr", amount, "X", 0.01,',
       "test_defaults")
mutant("default: --momentum", "machinery/options",
       '"--momentum", share, "X", 0.9,',
       '"--momentum", share, "X", 0.95,',
       "test_defaults")
mutant("default: --weight-decay", "machinery/options",
       '"--weight-decay", amount, "X", 1e-3,',
       '"--weight-decay", amount, "X", 1e-4,',
       "test_defaults")
mutant("default: --log-every", "machinery/options",
       '"--log-every", positive, "STEPS", 50,',
       '"--log-every", positive, "STEPS", 10,',
       "test_defaults")
mutant("default: --timeout", "machinery/options",
       '"--timeout", number(float, 1, 10**9), "SECONDS", 600,',
       '"--timeout", number(float, 1, 10**9), "SECONDS", 1800,',
       "test_defaults")
mutant("default: --schedule", "machinery/options",
       '"--schedule", list(SCHEDULES), None, "cosine",',
       '"--schedule", list(SCHEDULES), None, "constant",',
       "test_defaults")
mutant("default: --label-smoothing", "machinery/options",
       '"--label-smoothing", share, "X", 0.1,',
       '"--label-smoothing", share, "X", 0.0,',
       "test_defaults")
mutant("range: --seed", "machinery/options",
       "number(int, 0, 2**63 - 1)",
       "number(int, 0, 2**63)",
       "test_ranges[seed]")
mutant("range: --image-size", "machinery/options",
       "number(int, 8)",
       "number(int, 1)",
       "test_ranges[image-size]")
mutant("range: ends are left out", "machinery/options",
       "if not low <= value <= high",
       "if not low < value <= high",
       "test_ranges")
mutant("range: the last is left out", "machinery/options",
       "if not low <= value <= high",
       "if not low <= value < high",
       "test_ranges")
mutant("resume: --deterministic is another run", "machinery/options",
       '"--deterministic", MAY_CHANGE,',
       '"--deterministic", FIXED,',
       "test_what_may_change_at_resume[deterministic]")
mutant("resume: --tensorboard is another run", "machinery/options",
       '"--tensorboard", MAY_CHANGE,',
       '"--tensorboard", FIXED,',
       "test_what_may_change_at_resume[tensorboard]")
mutant("resume: --amp is harmless", "machinery/options",
       '"--amp", ["off", "bf16", "fp16"], None, "off", FIXED,',
       '"--amp", ["off", "bf16", "fp16"], None, "off", MAY_CHANGE,',
       "test_what_may_change_at_resume[amp]")
mutant("resume: --grad-compress is harmless", "machinery/options",
       '"--grad-compress", ["none", "bf16", "fp16", "powersgd"], None, "none", FIXED,',
       '"--grad-compress", ["none", "bf16", "fp16", "powersgd"], None, "none", MAY_CHANGE,',
       "test_what_may_change_at_resume[grad_compress]")
mutant("eval-only: in another precision", "machinery/options",
       '"--dtype", ["float32", "float64"], None, "float32", EVALUATED,',
       '"--dtype", ["float32", "float64"], None, "float32", FIXED,',
       "test_what_may_change_at_resume[dtype]")
mutant("eval-only: with another smoothing", "machinery/options",
       '"--label-smoothing", share, "X", 0.1, EVALUATED,',
       '"--label-smoothing", share, "X", 0.1, FIXED,',
       "test_what_may_change_at_resume[label_smoothing]")
mutant("nodes: workers are compared", "machinery/options",
       '"--workers", whole, "N", None, FREE,',
       '"--workers", whole, "N", None, MAY_CHANGE,',
       "test_what_may_differ_between_nodes")

# ----------------------------------------------------------------------------------------------------------------------- machinery/check.py

mutant("slurm: only the first task checks", "machinery/check", "launched and os.environ", "os.environ", "test_every_task_of_srun_checks")
mutant("check: in the process of the run", "machinery/check",
       "pool.submit(check_given).result()", "check(*given)",
       "test_check_starts_no_thread_and_draws_no_random_number", "test_check_leaves_no_trace_in_the_state_of_the_task[single-1]")
mutant("check: the collector copies what the child shares", "machinery/check", "    gc.freeze()\n", "",
       "test_collector_of_the_check_leaves_alone_what_it_shares_with_the_run")
LAST_LACKS = "test_task_that_cannot_be_right_is_refused_before_the_run[last_lacks]"
mutant("check: names of metrics are not compared", "machinery/check", "val_set, indices, on_cpu, meter)",
       "val_set, [*indices], on_cpu, common.Meter(meter.device))", LAST_LACKS)
mutant("check: the start of the evaluation set alone", "machinery/check", "for indices in few, [*range(n - last, n)]:",
       "for indices in (few,):", LAST_LACKS)
mutant("check: the last batch is as large as the others", "machinery/check", "min(2, n % batch_size or batch_size)", "min(2, batch_size)", LAST_LACKS)
mutant("check: one sample", "machinery/check", "range(min(2, args.batch_size))", "range(1)", f"{REFUSED}[single-1 --task TMP/data-ragged.py]")
mutant("check: training samples are not looked at", "machinery/check",
       "    check_samples(args, task, net, train_set, few, on_cpu, meter)\n", "",
       f"{REFUSED}[single-1 --task TMP/data-ragged.py]")
mutant("check: the model is always in training mode", "machinery/check", "    net.eval()\n", "", f"{REFUSED}[single-1 --task TMP/metrics-empty.py]")
mutant("check: a mean is a loss", "machinery/check", "        common.Meter(meter.device).add(loss=losses)\n", "",
       f"{REFUSED}[single-1 --task TMP/loss-mean.py]")
mutant("check: a loss for each pair of samples", "machinery/check", "if len(losses) != len(indices):", "if False:",
       f"{REFUSED}[single-1 --task TMP/loss-of-pairs.py]")
mutant("check: no metric", "machinery/check", "if not (metrics or net.training) or RESERVED", "if RESERVED", f"{REFUSED}[single-1 --task TMP/metrics-empty.py]")
mutant("check: a mean is a metric", "machinery/check", "else meter).add(loss=losses, **metrics)", "else meter).add(loss=losses)",
       f"{REFUSED}[single-1 --task TMP/metrics-mean.py]")
mutant("nodes: --dist-url is not checked", "machinery/launch",
       "check_address(option, url.hostname, url.port, args.node_rank, args.nnodes)", "pass",
       "test_pitfall_40_unusable_address_is_an_error[tcp://no-such-host.invalid:29500]")
mutant("check: a checkpoint that lacks its parts is a traceback", "machinery/check",
       'with blame(f"--resume {args.resume}: not a checkpoint of this program"):', 'with __import__("contextlib").nullcontext():',
       f"{REFUSED}[single-1 --resume TMP/listed.pt]")
NETWORK = "test_network_that_cannot_work_is_refused"
mutant("check: expanded buffers", "machinery/tasks", "0 in tensor.stride()", "False",
       NETWORK)
mutant("check: a forward may make buffers", "machinery/check", "names_of_tensors(args, net) - tensors", "tensors - tensors",
       NETWORK)
mutant("check: a forward may make buffers that an average lacks", "machinery/check", 'if args.average != "none" else []', "if False else []",
       NETWORK)
mutant("check: volumes under --channels-last", "machinery/tasks", "args.channels_last and tensor.dim() == 5", "False",
       NETWORK)
mutant("check: samples are fetched once", "machinery/check", "digest(batch) != digest(fetch(args, dataset, indices))", "not digest(batch)",
       "test_data_set_with_a_generator_of_its_own_is_refused")
mutant("task: its top draws what the process drew before", "machinery/tasks", "        seed_generators(0)  # what the file draws at its top is the same on every rank\n", "",
       "test_data_that_a_task_draws_while_it_is_loaded_are_the_same_on_every_rank")
mutant("check: weights of another model", "machinery/check", 'net.load_state_dict(checkpoint["model"])', "pass",
       f"{REFUSED}[single-1 --resume TMP/weights.pt]")
mutant("check: settings of the optimizer are not tried", "machinery/check", "optimizer = task.build_optimizer(args, net)", "optimizer = torch.optim.SGD(net.parameters())",
       f"{REFUSED}[single-1 --optimizer adamw --momentum 1]")
mutant("check: what only the accelerator can do is refused", "machinery/check", "if on_cpu:", "if True:",
       "test_model_that_only_the_accelerator_can_run_is_not_refused")
mutant("check: a metric named count", "machinery/tasks", 'RESERVED = {"loss", "count", "event", "epoch", ',
       'RESERVED = {"loss", "event", "epoch", ', "test_names_that_the_log_uses_itself_are_no_metrics")
mutant("check: a metric named epoch", "machinery/tasks", 'RESERVED = {"loss", "count", "event", "epoch", ',
       'RESERVED = {"loss", "count", "event", ', "test_names_that_the_log_uses_itself_are_no_metrics")
mutant("data: drawn without a seed", "machinery/tasks", "    seed_generators(args.seed)\n", "", "test_data_that_a_task_draws_are_the_same_on_every_rank")
mutant("data: drawn without --seed", "machinery/tasks", "    seed_generators(args.seed)\n", "    seed_generators(0)\n", "test_data_that_a_task_draws_are_the_same_on_every_rank")
mutant("model: initial weights without the seed", "machinery/tasks", "    torch.manual_seed(args.seed)\n", "",
       "test_seed_decides_the_initial_weights")
mutant("options: a task without metrics", "machinery/tasks", "needed = [name for name in Task._fields if", "needed = [name for name in Task._fields[:3] if", f"{REFUSED}[single-1 --task TMP/three.py]")
mutant("options: keyword-only options of a task not filled in", "machinery/tasks",
       "{name: getattr(args, name) for name in names}", "{name: 0.0 for name in names}",
       "test_label_smoothing_reaches_the_loss")
mutant("weights: ignored in a run", "machinery/tasks",
       'load_weights(net, read_tensors(args.weights, "--weights"), option)', "pass",
       "test_weights_are_where_training_starts_in_every_mode[single-1]")
mutant("weights: rounded to float32 first", "machinery/tasks", "        net.to(getattr(torch, args.dtype))\n", "",
       "test_weights_keep_their_precision")
CANNOT = "test_task_that_cannot_be_right_is_refused_before_the_run"
mutant("model: lazy modules pass", "machinery/tasks", "if nn.parameter.is_lazy(tensor):", "if False:", f"{CANNOT}[lazy]")
mutant("model: complex numbers pass", "machinery/tasks", "if tensor.is_complex():", "if False:", f"{CANNOT}[complex]")
mutant("model: complex buffers pass", "machinery/tasks", "[*net.named_parameters(), *net.named_buffers()]", "net.named_parameters()",
       f"{CANNOT}[complex_buffer]")
mutant("model: nothing to train", "machinery/tasks", "or not list(net.parameters()):", ":", f"{REFUSED}[single-1 --task TMP/model-empty.py]")
mutant("channels last: ignored", "machinery/tasks",
       "torch.channels_last if args.channels_last else torch.contiguous_format",
       "torch.contiguous_format",
       "test_filters_are_stored_as_asked")
mutant("channels last: always", "machinery/tasks",
       "torch.channels_last if args.channels_last else torch.contiguous_format",
       "torch.channels_last",
       "test_filters_are_stored_as_asked")
mutant("task: its folder goes first", "machinery/tasks",
       "sys.path.append(folder)",
       "sys.path.insert(0, folder)",
       "test_neighbours_of_a_task_replace_nothing")
mutant("options: metrics without their options", "machinery/tasks",
       'for name in ("per_sample_loss", "per_sample_metrics", "train_metrics"):',
       'for name in ("per_sample_loss", "train_metrics"):',
       "test_options_of_a_loss_and_of_a_metric_are_filled_in")

# ------------------------------------------------------------------------------------------------------------------- machinery/stand_ins.py

mutant("replicas: buffers shared", "machinery/stand_ins", "name: b.clone() for", "name: b for",
       "test_data_parallel_is_ddp_with_batchnorm")
mutant("replicas: buffers never updated", "machinery/stand_ins", "buffers = dict(self.module.named_buffers())",
       "buffers = {name: b.clone() for name, b in self.module.named_buffers()}", "test_data_parallel_is_ddp_with_batchnorm")
mutant("replicas: the last one updates the buffers", "machinery/stand_ins", "enumerate([buffers, *copies])",
       "enumerate([*copies, buffers])", "test_data_parallel_is_ddp_with_batchnorm")
mutant("replicas: all accelerators drop the same units", "machinery/stand_ins", "accelerator.manual_seed(seed + r)",
       "accelerator.manual_seed(seed)", "test_replicas_on_accelerators_have_their_own_random_streams")
mutant("replicas: more than there are pieces", "machinery/stand_ins", "for _ in range(1, counts[0])]", "for _ in range(1, self.replicas)]",
       "test_replicas_take_empty_parts_of_a_sample")
mutant("replicas: all drop the same units", "machinery/stand_ins", "seed_generators(seed + r)",
       "seed_generators(seed)", f"{MASKS}[dp-2]")
mutant("replicas: cut otherwise than torch does", "machinery/stand_ins",
       "tensor.chunk(self.replicas)[r]", "tensor.tensor_split(self.replicas)[r]",
       "test_pitfall_29_data_parallel_gathers_losses")
mutant("replicas: first outputs twice", "machinery/stand_ins", "for output in outputs])",
       "for output in [outputs[0], *outputs[:-1]]])", f"{EQUAL}[dp-2-1]")
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
HALVES = "test_half_precision_is_normalised_by_statistics_in_float32"
mutant("sync-bn: statistics in half precision", "machinery/stand_ins", "value.to(torch.promote_types(given, torch.float32))", "value", HALVES)
mutant("sync-bn: float32 out of half precision", "machinery/stand_ins", "return normalised.to(given)", "return normalised", HALVES)
mutant("sync-bn: squares in half precision", "machinery/stand_ins", "centred.square().sum(dims)", "centred.to(given).square().float().sum(dims)", HALVES)
mutant("sync-bn: normalised in half precision", "machinery/stand_ins", "normalised = centred *", "normalised = centred.to(given) *", HALVES)
mutant("sync-bn: count in half precision", "machinery/stand_ins", "value.numel() / value.shape[1], dtype=value.dtype)",
       "value.numel() / value.shape[1], dtype=given).to(value.dtype)", HALVES)
mutant("sync-bn: mean in half precision", "machinery/stand_ins", "mean, n = total[:-1] / total[-1],", "mean, n = (total[:-1] / total[-1]).to(given).to(value.dtype),",
       HALVES)
mutant("sync-bn: statistics of a layer in half precision", "machinery/stand_ins", "self.running_mean.lerp_(mean.to(self.running_mean.dtype), factor)",
       "self.running_mean.lerp_(mean, factor)", HALVES)
mutant("sync-bn: converted on accelerators too", "machinery/stand_ins",
       'if device.type != "cpu":\n        return nn.Sync',
       "if False:\n        return nn.Sync",
       "test_accelerators_have_torchs_own")
mutant("options: --compile in data parallel", "machinery/options", "wrong = mode == \"dp\" and args.compile", "wrong = False",
       f"{REFUSED}[dp-2 --compile]")
mutant("check: set_epoch is not called and nobody says so", "machinery/check", "if hasattr(train_set, \"set_epoch\"):", "if False:",
       f"{REFUSED}[single-1 --task TMP/data-told.py]")
mutant("options: a run of which only best.pt is left", "machinery/options", 'any(directory.glob("*.pt"))', '(directory / "last.pt").exists()',
       "test_directory_with_only_the_best_checkpoint_is_taken")
mutant("task: its optimizer is not asked", "machinery/tasks", "return Task(**found)", 'return Task(**{**found, "build_optimizer": default_optimizer})',
       "test_optimizer_of_a_task_is_the_same_in_every_mode")
mutant("check: an optimizer that is none", "machinery/check", "if not isinstance(optimizer, torch.optim.Optimizer):", "if False:",
       "test_optimizer_that_cannot_be_right_is_refused")
mutant("options: a final rate without effect", "machinery/options", 'args.final_lr > 0 and schedule in ("constant", *USE_MARKS)', "False",
       "test_final_rate_without_effect_is_refused")
REFUSED_OPTIMIZER = "test_optimizer_that_cannot_be_right_is_refused"
mutant("check: an optimizer with a closure", "machinery/check", "inspect.signature(optimizer.step).bind()", "pass", REFUSED_OPTIMIZER)
mutant("check: an optimizer that leaves a parameter out", "machinery/check", "if not trained <= parts <= {", "if not parts <= {", REFUSED_OPTIMIZER)
mutant("check: an optimizer of another model", "machinery/check", "if not trained <= parts <= {id(p) for p in net.parameters()}:", "if False:", REFUSED_OPTIMIZER)
mutant("check: an optimizer that cannot be read again", "machinery/check", "torch.load(file, weights_only=True)", "pass", REFUSED_OPTIMIZER)
mutant("options: of a task are not asked for", "machinery/options", "task_options = add_options_of_task(parser, argv)", "task_options = []",
       "test_options_of_a_task_are_parsed_stored_and_compared")
mutant("options: every task is run to parse", "machinery/options", "or not adds.search(path.read_bytes())", "",
       "test_task_without_options_is_not_run_to_parse_the_command_line")
mutant("options: a task's defaults of any kind", "machinery/options", "refuse(not is_plain(value), f", "refuse(False, f",
       "test_options_of_a_task_that_cannot_be_right_are_refused")
mutant("options: nothing is proposed for a misspelt one", "machinery/options", "if wrong else []", "if not wrong else []", f"{REFUSED}[single-1 --batch 32]")
TASK_OPTIONS = "test_options_of_a_task_that_cannot_be_right_are_refused"
mutant("options: lists of anything", "machinery/options", "return all(is_plain(item) for item in value)", "return True", TASK_OPTIONS)
mutant("options: a task that imports all is not asked", "machinery/options", r"|\bimport \*", "", "test_options_of_a_task_may_be_imported")
mutant("options: a task that speaks of them must have them", "machinery/options", 'getattr(fresh[path], "add_options", None)', "fresh[path].add_options", "test_task_that_only_speaks_of_options_is_no_error")
mutant("options: the task is run again", "machinery/tasks", "fresh.pop(path, None) or ", "", "test_task_with_options_is_run_once_in_a_process")
mutant("options: an evaluation does not mind those of a task", "machinery/files", "keys(EVALUATED) | {*args.task_options}", "keys(EVALUATED)", "test_evaluation_minds_the_options_of_a_task")
mutant("options: what a task puts into args is stored", "machinery/run", 'checkpoint["config"] = declared(self.args)', 'checkpoint["config"] = vars(self.args)', "test_run_goes_on_with_an_option_that_is_new_and_with_what_a_task_puts_into_args")
mutant("best: fixed before there is a score", "machinery/files", 'if checkpoint["best"] is None and', "if False and", "test_metric_of_the_whole_set_that_is_not_there_ends_the_run_by_name")
mutant("best: may change with a score", "machinery/files", 'if checkpoint["best"] is None and', "if", "test_metric_of_the_whole_set_that_is_not_there_ends_the_run_by_name")
mutant("metrics: of the set draw what is next", "machinery/tasks", "    seed_rng(seed, -2, 0)", "    str()", "test_metric_of_the_whole_set_may_draw_numbers_and_ask_for_options")
mutant("metrics: of the set may use a name of the log", "machinery/tasks", "if taken := ", "if taken := () and ", "test_metrics_of_the_whole_set_that_cannot_be_right")
mutant("metrics: lists for nobody", "machinery/check", 'lists = "" if task.dataset_metrics else', 'lists = "" if True else', "test_lists_that_nobody_uses_are_refused")
mutant("check: looks for the accelerator in a fork", "machinery/check", "    accelerator.is_available = lambda: False\n", "",
       "test_check_of_adam_does_not_look_for_the_accelerator")
mutant("powersgd: on the CPU beside a GPU", "machinery/options", 'wrong = powersgd and device_type == "cpu" and torch.accelerator.is_available()', "wrong = False",
       "test_power_sgd_on_the_cpu_beside_a_gpu_is_refused")
mutant("check: the optimizer makes no step", "machinery/check", "        optimizer.step()\n", "", "test_optimizer_that_cannot_be_right_is_refused")
mutant("hint: fragments of choices", "machinery/options", "re.findall(r\"[^\\s',()]+\", message", "re.findall(r\"[\\w-]+\", message", "test_hint_is_a_whole_choice")
mutant("hint: for any word", "machinery/options", "(?=--\\w)", "", "test_bad_input_is_refused_by_name[single-1 -- lr]")
mutant("optimizer: sees classes that sharding has changed", "machinery/tasks", "            module.__class__ = kind\n", "            str()\n", "test_groups_by_kind_of_layer_are_the_same_with_sync_bn")
mutant("optimizer: classes stay as built", "machinery/tasks", "            module.__class__ = now\n", "            str()\n", "test_network_has_its_own_classes_again_after_the_optimizer")
mutant("resume: numbers of the state take the type of the weights", "machinery/state", "now[name] = value.to(now[name].device)", "now[name] = now[name]", "test_numbers_in_the_state_of_an_optimizer_keep_their_type")
mutant("options: --step-gamma without effect", "machinery/options", "unused = args.step_gamma != 0.1", "unused = False", "test_final_rate_without_effect_is_refused")
mutant("best: an unknown metric of the whole set", "machinery/run", '        if name not in known:\n', "        if False:\n",
       "test_metric_of_the_whole_set_that_is_not_there_ends_the_run_by_name")
NO_SWA = "test_swa_that_would_average_nothing_is_refused"
mutant("options: --swa-start without SWA", "machinery/options", 'unused = args.average != "swa" and args.swa_start != 0.75', "unused = False", NO_SWA)
mutant("options: SWA of nothing", "machinery/options", 'none = args.average == "swa" and not swa_epochs(**vars(args))', "none = False", NO_SWA)
mutant("tasks: training metrics with gradients", "machinery/tasks", "    @torch.no_grad()\n    def without_lists", "    def without_lists",
       "test_training_metrics_are_of_the_samples_since_the_last_line")
mutant("tasks: lists in the training log", "machinery/tasks", "if not isinstance(value, list)}", "}", "test_training_metrics_are_of_the_samples_since_the_last_line")
mutant("tasks: training metrics are computed unasked", "machinery/tasks", 'found.setdefault("train_metrics", no_metrics)', 'found.setdefault("train_metrics", found["per_sample_metrics"])',
       "test_training_log_has_the_loss_alone_unless_a_task_asks")
mutant("task: no metrics in the training log", "task", "train_metrics = per_sample_metrics", "", "test_shipped_task_logs_its_metrics_of_the_training")
mutant("check: a metric named like the rate", "machinery/tasks", '"global_step", "lr", ', '"global_step", ', "test_names_that_the_log_uses_itself_are_no_metrics")
mutant("check: a metric named like the waiting", "machinery/tasks", '"skipped", "data_wait", ', '"skipped", ', "test_names_that_the_log_uses_itself_are_no_metrics")
WARNED = "test_cpu_is_said_where_an_accelerator_has_a_driver"
mutant("device: a CPU in place of the accelerator is not said", "machinery/processes", "        warn_of_cpu(name)\n", "", WARNED)
mutant("device: a chosen CPU is warned of", "machinery/processes", 'if name == "auto" and driver', "if driver", WARNED)
mutant("device: hidden accelerators are warned of", "machinery/processes", " and not hidden:", ":", WARNED)
mutant("task: classes without names", "task", '    held_out.classes = val.classes\n', "", "test_checkpoint_names_the_classes")
mutant("task: digits without names", "task", '        held_out.classes = list("0123456789")\n', "", "test_checkpoint_names_the_classes")
mutant("task: arrays without names", "task", "        sets[-1].classes = source.classes\n", "", "test_arrays_are_augmented_in_training_only")
mutant("dp: metrics of the training are left out", "machinery/stand_ins", 'return {"loss": losses, **self.task.train_metrics(outputs, targets)}', 'return {"loss": losses}',
       "test_training_metrics_are_of_the_samples_since_the_last_line[dp-2]")
