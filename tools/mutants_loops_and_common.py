"""Mutants: loops and common."""

from mutants_base import *

# One fault takes two or three lines here, and not seven.
# fmt: off

# ------------------------------------------------------------------------------------------------------ the loops of the scripts

WRAP = "model = DistributedDataParallel(net, find_unused_parameters=args.find_unused_parameters, gradient_as_bucket_view=True)"
SCALED = "loss = losses.sum() * (dist.get_world_size() / args.batch_size)"
UNSCALE = "        state.scaler.unscale_(state.optimizer)\n"
CLIP = "        common.clip_grad_norm(state.net, args.clip_grad_norm, state.scaler.norm)\n"
NORM = "        state.scaler.norm = nn.utils.get_total_norm([p.grad for p in state.net.parameters() if p.grad is not None])\n"
STEP = "state.scaler.step(state.optimizer)"
ADD = "            run.meter.add(loss=losses)\n"
SYNC = "        common.sync_buffers(net)\n"
SAMPLER = "args.balanced, rank, world_size"
SETTLE = "    common.settle_buckets(model, task.per_sample_loss, train_loader, args.amp)\n"
EVALUATE = "run.end_epoch(evaluate(args, task, eval_model, val_loader, device))"
CONVERT = "net = convert_sync_batchnorm(net, device) if args.sync_bn else net"

for mode, two, uneven in (("ddp", f"{EQUAL}[ddp-2-1]", f"{EQUAL}[ddp-2-2]"), ("spawn", f"{EQUAL}[spawn-2-1]", f"{EQUAL}[spawn-2-2]")):
    script, masks, nan = f"train_{mode}", f"{MASKS}[{mode}-2]", f"{NAN}[{mode}-2]"
    resumed = f"{BITWISE}[spawn-3-9]" if mode == "spawn" else "survivors::test_resume_on_three_ranks_is_bitwise"
    sync_bn = f"survivors::test_sync_bn_with_accumulation_equals_one_device[{mode}-2]"
    mutant(f"{mode}: no wrapper", script, WRAP, "model = net", two)
    mutant(f"{mode}: world size missing in the loss", script, SCALED, "loss = losses.sum() / args.batch_size", two)
    mutant(f"{mode}: mean of the ranks' means", script, SCALED, "loss = losses.mean() / args.accum_steps", uneven)
    mutant(f"{mode}: every rank trains on the whole batch", script, SAMPLER, "args.balanced", two)
    mutant(f"{mode}: dropout seed without the rank", script, "state.global_step, i, dist.get_rank())", "state.global_step, i)", masks)
    mutant(f"{mode}: dropout seed without the micro-batch", script, "state.global_step, i, dist", "state.global_step, 0, dist", masks)
    mutant(f"{mode}: dropout seed repeats every epoch", script, "args.seed, state.global_step, i", "args.seed, state.step, i", masks)
    mutant(f"{mode}: NaN is not skipped", script, STEP, "state.optimizer.step()", nan)
    mutant(f"{mode}: buffers not synchronised", script, SYNC, "", f"survivors::test_batchnorm_buffers_are_evaluated_alike[{mode}]")
    mutant(f"{mode}: --sync-bn ignored", script, CONVERT, "net = net", sync_bn)
    mutant(f"{mode}: buckets not settled", script, SETTLE, "", resumed)
    mutant(f"{mode}: gradients kept after the step", script, "        state.optimizer.zero_grad(set_to_none=True)\n", "", two)

LAST_ONE = "model.require_backward_grad_sync = i == args.accum_steps - 1"
FORWARD = """            seed_rng(args.seed, state.global_step, i, dist.get_rank())
            with common.autocast(run.device, args.amp):
                losses = task.per_sample_loss(model(inputs), targets)
"""
mutant("ddp: nothing is synchronised", "train_ddp", LAST_ONE, "model.require_backward_grad_sync = False", f"{EQUAL}[ddp-2-1]")
mutant("ddp: the first micro-batch is synchronised", "train_ddp", LAST_ONE, "model.require_backward_grad_sync = i == 0", f"{EQUAL}[ddp-2-2]")
mutant("ddp: every micro-batch is synchronised", "train_ddp", LAST_ONE, "model.require_backward_grad_sync = True",
       ONE + "09_accumulation_synchronises_the_last_piece")
mutant("ddp: synchronisation decided after the forward", "train_ddp", f"            {LAST_ONE}\n{FORWARD}", f"{FORWARD}            {LAST_ONE}\n",
       ONE + "09_accumulation_synchronises_the_last_piece")
mutant("ddp: clipped before unscaling", "train_ddp", UNSCALE + CLIP, NORM + CLIP + UNSCALE, MANY + "21_clipping_sees_the_true_gradient")
mutant("ddp: unscale_ missing", "train_ddp", UNSCALE, NORM, MANY + "21_clipping_sees_the_true_gradient")
mutant("ddp: schedule stepped per micro-batch", "train_ddp", ADD, ADD + "            state.scheduler.step()\n",
       MANY + "24_schedule_counts_global_batches")
mutant("ddp: a rank leaves its own NaN out", "train_ddp", f"            {SCALED}",
       f"            if not losses.isfinite().all():\n                continue\n            {SCALED}", ONE + "05_nan_on_one_rank")
mutant("ddp: evaluates the weights, not their average", "train_ddp", EVALUATE, EVALUATE.replace("eval_model", "net"),
       f"{FEATURE}[ddp-3-ema]")
mutant("ddp: every rank evaluates everything", "train_ddp",
       "ShardSampler(len(val_set), args.eval_batch_size, rank, world_size)",
       "ShardSampler(len(val_set), args.eval_batch_size)", MANY + "19_all_ranks_evaluate")
mutant("ddp: @record missing", "train_ddp", "@record  # torchrun\n", "",
       LAST + "41_torchrun_shows_the_cause")
mutant("ddp: --timeout not handed on", "train_ddp", "timeout(args.timeout), world_size", "None, world_size",
       "survivors::test_timeout_reaches_the_process_group[ddp-2]")
mutant("ddp: --find-unused-parameters ignored", "train_ddp", "find_unused_parameters=args.find_unused_parameters, ", "",
       MANY + "28_unused_parameters")
mutant("ddp: --grad-compress ignored", "train_ddp", "    common.compress_gradients(model, args.grad_compress, scaler)\n", "",
       "survivors::test_compressed_gradients_differ_by_their_rounding[bf16]")
mutant("spawn: --timeout not handed on", "train_spawn", "timeout(args.timeout), world_size", "None, world_size",
       "survivors::test_timeout_reaches_the_process_group[spawn-2]")
mutant("spawn: local rank for rank", "train_spawn", "rank = args.node_rank * args.nproc + local_rank", "rank = local_rank",
       LAST + "40_two_launchers_are_one_job")
mutant("spawn: arguments checked after the start", "train_spawn", "    check_run(args)\n", "",
       "survivors::test_spawn_checks_before_it_starts_a_process")

PLAIN = "loss = losses.sum() / args.batch_size"
SEED = "seed_rng(args.seed, state.global_step, i)"
for mode, n in (("single", 1), ("dp", 2)):
    script, masks = f"train_{mode}", f"{MASKS}[{mode}-{n}]"
    accumulated = "equivalence::test_accumulation_on_one_device[2]" if mode == "single" else f"{EQUAL}[dp-2-2]"
    mutant(f"{mode}: mean over the micro-batch", script, PLAIN, "loss = losses.mean()", accumulated)
    mutant(f"{mode}: dropout seed without the step", script, SEED, "seed_rng(args.seed, 0, i)", masks)
    mutant(f"{mode}: dropout seed without the micro-batch", script, SEED, "seed_rng(args.seed, state.global_step, 0)", masks)
    mutant(f"{mode}: NaN is not skipped", script, STEP, "state.optimizer.step()", f"{NAN}[{mode}-{n}]")
    mutant(f"{mode}: clipped before unscaling", script, UNSCALE + CLIP, NORM + CLIP + UNSCALE,
           "survivors::test_loss_scale_leaves_no_trace[" + f"{mode}-{n}]")
    mutant(f"{mode}: unscale_ missing", script, UNSCALE, NORM, f"survivors::test_loss_scale_leaves_no_trace[{mode}-{n}]")
    mutant(f"{mode}: model stays in evaluation mode", script, "    common.train_mode(model)\n", "", masks)
    mutant(f"{mode}: model evaluated in training mode", script, "    model.eval()\n", "", masks)

mutant("single: schedule stepped per micro-batch", "train_single", ADD, ADD + "            state.scheduler.step()\n", f"{LR}[constant]")
mutant("single: loss of the last micro-batch alone is logged", "train_single", ADD,
       "            run.meter.clear()\n" + ADD,
       "equivalence::test_accumulation_on_one_device[2]")
mutant("dp: mean of the replicas' means", "train_dp", PLAIN,
       "loss = sum(piece.mean() for piece in losses.chunk(args.replicas)) / args.replicas", LAST + "29_data_parallel_gathers_losses")
mutant("dp: loss computed outside the replicas", "train_dp", "losses = model(inputs, targets)  #",
       "losses = task.per_sample_loss(state.net(inputs), targets)  #", LAST + "29_data_parallel_gathers_losses")
mutant("dp: replicas not counted in --scale-lr", "train_dp", "common.scale_lr(args.lr, args.scale_lr, args.replicas)",
       "common.scale_lr(args.lr, args.scale_lr)", f"{SCALE_LR}[dp-linear-4]")
mutant("dp: evaluates the weights, not their average", "train_dp", EVALUATE, EVALUATE.replace("eval_model", "net"),
       f"{FEATURE}[dp-3-ema]")

# ------------------------------------------------------------------------------------------------------------------- sampling.py

mutant("order: the same every epoch", "sampling", "manual_seed(splitmix64(self.seed, self.epoch))", "manual_seed(splitmix64(self.seed, 0))", ORDER)
mutant("order: without the seed", "sampling", "manual_seed(splitmix64(self.seed, self.epoch))", "manual_seed(splitmix64(0, self.epoch))", ORDER)
mutant("sampler: a resumed epoch starts anew", "sampling", "self.epoch, self.step = epoch, step", "self.epoch, self.step = epoch, 0",
       "sampling::test_resuming_at_any_step_yields_exactly_the_rest[1]")
mutant("sampler: all ranks take the same piece", "sampling", "tensor_split(self.world_size)[self.rank] for",
       "tensor_split(self.world_size)[0] for", PIECES)
mutant("sampler: strided pieces", "sampling", "m.tensor_split(self.world_size)[self.rank] for",
       "m[self.rank :: self.world_size] for", PIECES)
mutant("sampler: torch.chunk, which may leave a rank without samples", "sampling", "m.tensor_split(self.world_size)[self.rank] for",
       "(*m.chunk(self.world_size), *[m[:0]] * self.world_size)[self.rank] for",
       "sampling::test_pieces_of_all_ranks_partition_each_global_batch[4]")
mutant("sampler: micro-batches cut after the ranks", "sampling", "batch.tensor_split(self.accum_steps)", "[batch]",
       "sampling::test_micro_batches_of_all_ranks_are_those_of_one_device[2-2]")
mutant("sampler: the ragged tail is kept", "sampling", "steps_per_epoch = length // batch_size",
       "steps_per_epoch = math.ceil(length / batch_size)", PIECES)
mutant("sampler: an empty epoch is accepted", "sampling", "if batch_size > length:", "if False:",
       "sampling::test_empty_epoch_is_an_error_that_names_both_numbers")
mutant("evaluation: shards padded to the same length", "sampling", "min(start + self.batch_size, self.length)",
       "start + self.batch_size", SHARDS)
mutant("evaluation: every rank starts at sample 0", "sampling", "[rank::world_size]", "[0::world_size]", SHARDS)
mutant("evaluation: the last batch is dropped", "sampling", "range(0, length, self.batch_size)[",
       "range(0, length - self.batch_size + 1, self.batch_size)[", SHARDS)
mutant("augmentation: no seed per sample", "sampling", "seed_generators(splitmix64(self.seed, epoch, index))", "pass",
       f"{AUGMENTED}[3-1-0-per sample]")
mutant("augmentation: per-sample seed without the epoch", "sampling", "splitmix64(self.seed, epoch, index)", "splitmix64(self.seed, 0, index)",
       f"{AUGMENTED}[0-3-0-per sample]")
mutant("augmentation: per-sample seed without the index", "sampling", "splitmix64(self.seed, epoch, index)", "splitmix64(self.seed, epoch, 0)",
       ONE + "08_augmentation_differs_between_workers_and_epochs")
mutant("augmentation: set_epoch forgotten", "sampling", "            dataset.set_epoch(epoch)\n", "            pass\n", f"{AUGMENTED}[0-3-0-in memory]")
mutant("augmentation: draws without the seed", "sampling", "splitmix64(splitmix64(seed, epoch), keys", "splitmix64(splitmix64(0, epoch), keys",
       UNIFORM)
mutant("augmentation: draws without the epoch", "sampling", "splitmix64(splitmix64(seed, epoch), keys", "splitmix64(splitmix64(seed, 0), keys",
       UNIFORM)
mutant("augmentation: draws without the index", "sampling", "keys, columns)", "np.zeros_like(keys), columns)", UNIFORM)
mutant("loader: workers started anew every epoch", "sampling", '{"persistent_workers": True, ', "{",
       LAST + "38_workers_stay_and_cores_are_divided")
mutant("loader: workers do not ignore signals", "sampling", "signal.signal(number, signal.SIG_IGN)", "pass", ONE + "11_sigterm_saves[2]")
mutant("loader: workers not ended at exit", "sampling", "multiprocessing.util.Finalize(None, _kill, (processes,), exitpriority=100)", "pass",
       ONE + "06_error_with_loader_workers_ends_the_process")
mutant("split_batch: strided micro-batches", "common", "t.tensor_split(pieces)[i]", "t[i::pieces]",
       "sampling::test_split_batch_cuts_nested_targets_along_the_first_dimension[2]")

# ------------------------------------------------------------------------------------------- common.py: reductions, optimization

REDUCE = "training_math::test_reduce_value_sums_or_averages_over_the_ranks_out_of_place[2]"
METER = "training_math::test_meter_is_the_exact_mean_over_uneven_and_empty_shards"
mutant("reduce_value: a sum for a mean", "common", "value = value / dist.get_world_size() if average else value", "pass", REDUCE)
mutant("reduce_value: in place", "common", "value = value.detach().clone()", "value = value.detach()", REDUCE)
mutant("meter: local means, not reduced", "common", "reduce_value(sums, average=False).tolist()", "sums.tolist()", METER)
mutant("meter: ranks averaged", "common", "reduce_value(sums, average=False)", "reduce_value(sums)", METER)
mutant("meter: a mean of means", "common", "value.detach().sum(dtype=self.dtype)\n        self.count += n",
       "value.detach().mean(dtype=self.dtype)\n        self.count += 1", METER)
mutant("meter: batches counted, not samples", "common", "self.count += n", "self.count += 1", METER)
mutant("meter: sums in float32", "common", 'torch.float32 if device.type == "mps" else torch.float64', "torch.float32", f"{EQUAL}[ddp-2-1]")
mutant("meter: count lost at resume", "common", 'int(share.pop("count"))', 'share.pop("count") * 0',
       "training_math::test_meter_goes_on_from_its_sums")
mutant("sync_buffers: no broadcast", "common", "dist.broadcast(buffer, src=0)", "pass",
       MANY + "18_batchnorm_buffers_are_equal_in_evaluation")
mutant("sync_buffers: weights not compared", "common", "zip(names, largest, smallest) if a != b", "[]",
       MANY + "27_forward_past_the_wrapper_is_noticed")
mutant("first backward: buffers keep a trace", "common", "buffer.copy_(before)", "pass", f"{BITWISE}[ddp-2-9]")
mutant("first backward: gradients stay", "common", "    model.zero_grad(set_to_none=True)\n", "", f"{BITWISE}[ddp-2-9]")
mutant("compression: bf16 sent as fp16", "common", 'f"{method}_compress_hook"', '"fp16_compress_hook"',
       "survivors::test_compressed_gradients_differ_by_their_rounding[bf16]")
mutant("seed_rng: without the step", "sampling", "splitmix64(seed, step, micro_batch) %", "splitmix64(seed, micro_batch) %",
       "training_math::test_dropout_seed_of_replica_r_is_that_of_rank_r")
mutant("seed_rng: without the rank", "sampling", "% 2**63 + rank", "% 2**63",
       "training_math::test_dropout_seed_of_replica_r_is_that_of_rank_r")
mutant("seed_rng: without the seed", "sampling", "splitmix64(seed, step, micro_batch) %", "splitmix64(0, step, micro_batch) %",
       "training_math::test_dropout_seed_of_replica_r_is_that_of_rank_r")
mutant("model: initial weights without the seed", "machinery/tasks", "    torch.manual_seed(args.seed)\n    net =", "    net =",
       "survivors::test_seed_decides_the_initial_weights")
mutant("freeze: has no effect", "common", "parameters[name].requires_grad_(False)", "parameters[name].requires_grad_(True)",
       "equivalence::test_training_is_not_trivial")
mutant("amp: never on", "common", 'enabled=amp != "off"', "enabled=False", "survivors::test_amp_computes_in_its_type[bf16]")
mutant("amp: bf16 for fp16", "common", 'torch.float16 if amp == "fp16" else torch.bfloat16', "torch.bfloat16",
       "survivors::test_amp_computes_in_its_type[fp16]")
mutant("optimizer: --weight-decay of AdamW ignored", "common", "(momentum, 0.999), weight_decay=decay",
       "(momentum, 0.999)", "survivors::test_optimizer_has_what_the_options_say")
mutant("optimizer: --weight-decay of SGD ignored", "common", '"weight_decay": decay, ', "",
       "survivors::test_optimizer_has_what_the_options_say")
mutant("memory: what is freed goes back to the system", "machinery/processes", "        mallopt(-1, 2**30)", "        0 and mallopt(-1, 2**30)",
       "data_and_models::test_memory_of_the_gradients_is_kept_from_step_to_step")
mutant("optimizer: --nesterov ignored", "common", '"nesterov": nesterov, ', "", "survivors::test_optimizer_has_what_the_options_say")
mutant("optimizer: momentum not initialised", "common", "for parameter in parameters if momentum else ():", "for parameter in ():",
       "training_math::test_fused_sgd_whose_first_step_is_skipped_starts_from_zero_momentum")
mutant("learning rate: always scaled", "common", "[rule]", '["linear"]', f"{SCALE_LR}[ddp-none-1]")
mutant("learning rate: root of N not taken", "common", '"sqrt": math.sqrt(devices)', '"sqrt": devices', f"{SCALE_LR}[ddp-sqrt-2]")
mutant("warm-up: off by one", "common", "factor * (step + 1) / start", "factor * step / start",
       "training_math::test_warmup_rises_linearly_to_the_peak")
mutant("cosine: ends after the run", "common", "(step - start) / max(1, end - start)", "(step - start) / end",
       "training_math::test_cosine_falls_from_one_to_zero_after_the_warmup")
mutant("cosine: begins with the warm-up", "common", "(step - start) / max(", "step / max(",
       "training_math::test_cosine_falls_from_one_to_zero_after_the_warmup")
mutant("step: drops one step late", "common", "bisect.bisect_right(", "bisect.bisect_left(",
       "training_math::test_step_drops_at_the_given_epochs")
mutant("step: epochs in another order", "common", "sorted(epoch * steps_per_epoch for epoch in step_epochs)",
       "[epoch * steps_per_epoch for epoch in step_epochs]",
       "survivors::test_step_epochs_in_any_order")
mutant("cyclic: a saw-tooth", "common", "(1 - abs(2 * ((step - start) % cycle) / cycle - 1))", "((step - start) % cycle) / cycle",
       "training_math::test_cyclic_is_a_triangle_between_gamma_and_one")
mutant("cyclic: one cycle only", "common", "((step - start) % cycle)", "(step - start)", "training_math::test_cyclic_is_a_triangle_between_gamma_and_one")
mutant("scaler: skipped steps not counted", "common", "bad = (torch.stack(found).sum() > 0)", "bad = (torch.stack(found).sum() < 0)",
       f"{SKIP}[nan-off]")
mutant("scaler: in a row is never reset", "common", "(self.in_a_row + bad) * bad", "self.in_a_row + bad", DIVERGED)
mutant("scaler: scale moves in float32", "common", "super().update(self.fixed_scale)", "super().update()", f"{SKIP}[nan-off]")
mutant("scaler: scale of fp16 fixed", "common", 'None if amp == "fp16" else 1.0', "1.0", f"{SKIP}[nan-fp16]")
mutant("scaler: skipped steps forgotten at resume", "common", 'self.skipped.fill_(state["skipped"])', "pass",
       "survivors::test_scaler_goes_on_where_it_was_saved")
mutant("scaler: steps in a row forgotten at resume", "common", 'self.in_a_row.fill_(state["in_a_row"])', "pass",
       "survivors::test_scaler_goes_on_where_it_was_saved")
mutant("clipping: limit ignored", "common", "if limit is not None:", "if False:",
       "training_math::test_clip_grad_norm_looks_at_the_whole_gradient[0.1]")
mutant("clipping: tensor by tensor", "common", "nn.utils.clip_grads_with_norm_(net.parameters(), limit, norm)",
       "[nn.utils.clip_grad_norm_(parameter, limit) for parameter in net.parameters()]",
       "training_math::test_clip_grad_norm_looks_at_the_whole_gradient[0.1]")
mutant("scaler: norm before unscaling", "common", "self.norm = nn.utils.get_total_norm(", "self.norm = self._scale * nn.utils.get_total_norm(",
       "training_math::test_scaler_keeps_the_norm_of_the_true_gradient[1024.0]")
mutant("scaler: only NaN is noticed", "common", "1 - self.norm.isfinite()", "self.norm.isnan()", f"{SKIP}[inf-off]")
mutant("ema: another decay", "common", "decay: float = 0.99", "decay: float = 0.9",
       "survivors::test_ema_and_swa_are_what_they_say")
mutant("ema: statistics not averaged", "common", "if started and before:", "if False:",
       "survivors::test_ema_and_swa_are_what_they_say")
mutant("devices: the first one for all", "machinery/processes", "torch.accelerator.set_device_index(index)",
       "torch.accelerator.set_device_index(0)", MANY + "17_device_is_chosen_before_anything_else")
mutant("devices: all cores for every process", "machinery/processes", " // processes", "",
       LAST + "38_workers_stay_and_cores_are_divided")
mutant("devices: --deterministic ignored", "machinery/processes", "torch.use_deterministic_algorithms(deterministic)",
       "torch.use_deterministic_algorithms(False)", "survivors::test_deterministic_is_handed_to_torch")

# --------------------------------------------------------------------------------------------------------- checkpoints, log, stop

RESTORE = 'for name in ("optimizer", "scheduler", "scaler"):\n            getattr'
mutant("save: file not on the disk before the rename", "common",
       "            os.fsync(file.fileno())  # the data must be on the disk before the name points to it\n", "", DURABLE)
mutant("save: name not on the disk", "common", "os.fsync(directory)", "pass", DURABLE)
mutant("save: written over the old file", "common", "os.replace(temporary, path)\n    except",
       "path.write_bytes(temporary.read_bytes())\n    except", DURABLE)
mutant("save: temporary file in another folder", "common", 'temporary = path.with_name(f".{path.name}.tmp")',
       'temporary = path.parent.parent / f".{path.name}.tmp"', DURABLE)
mutant("save: half a file stays behind", "common", "temporary.unlink(missing_ok=True)", "pass",
       "checkpoint::test_full_disk_in_the_middle_of_a_save_leaves_the_old_file_and_no_other")
mutant("save: NaN is written", "machinery/files", "        if bad:", "        if False:", "checkpoint::test_non_finite_parameters_never_reach_a_file")
mutant("save: NaN in the average is written", "machinery/files", ', *checkpoint["average"].items()]', "]",
       "survivors::test_non_finite_average_never_reaches_a_file")
mutant("save: --save-every ignored", "machinery/run", "if not ends and (due or self.stopping):", "if not ends and self.stopping:",
       "survivors::test_save_every_saves_within_the_epoch")
mutant("save: best.pt is the last", "machinery/run", "if math.isfinite(score) and (state.best is None or score > state.best):", "if True:",
       "survivors::test_best_is_not_the_last")
mutant("save: best.pt is the worst", "machinery/run", "or score > state.best)", "or score < state.best)",
       "checkpoint::test_best_and_kept_checkpoints")
mutant("load: runs code in the file", "common", "weights_only=True)", "weights_only=False)",
       "checkpoint::test_hostile_pickle_is_refused_and_does_not_run")
mutant("load: checksums not tested", "common", "damaged := file.testzip()", "damaged := None", f"{DAMAGED}[flipped]")
mutant("load: to the device that saved it", "common", 'map_location="cpu", ', "", MANY + "17_device_is_chosen_before_anything_else")
mutant("load: format not looked at", "common", 'or checkpoint.get("format") != FORMAT', "",
       "survivors::test_checkpoint_of_another_format_is_refused")
mutant("resume: changed options not noticed", "machinery/files", 'check_config(args, checkpoint["config"], path)', "pass",
       "checkpoint::test_changed_option_that_would_change_the_run_is_refused_by_name[--seed 1]")
mutant("resume: another seed counts as harmless", "machinery/options", '2**63 - 1), "N", 0, NONE', '2**63 - 1), "N", 0, MAY_CHANGE',
       "checkpoint::test_changed_option_that_would_change_the_run_is_refused_by_name[--seed 1]")
mutant("resume: a task may not move", "machinery/files", "then, now = Path(then).name, Path(now).name", "pass",
       "survivors::test_task_may_move_to_another_folder")
mutant("resume: optimizer not restored", "machinery/run", RESTORE, RESTORE.replace('"optimizer", ', ""), f"{BITWISE}[single-1-9]")
mutant("resume: scheduler not restored", "machinery/run", RESTORE, RESTORE.replace('"scheduler", ', ""),
       MANY + "23_learning_rate_goes_on_at_resume")
mutant("resume: scaler not restored", "machinery/run", RESTORE, RESTORE.replace(', "scaler"', ""),
       "survivors::test_loss_scale_of_fp16_goes_on_at_resume")
mutant("resume: average not restored", "machinery/run", "self.average.load_state_dict({", "dict({", f"{BITWISE}[single-1-9]")
mutant("resume: learning rate of the shorter run", "machinery/run", 'group["lr"] = peak * factor(self.global_step)', "pass",
       "checkpoint::test_more_epochs_follow_the_longer_schedule_from_the_first_step")
mutant("resume: each rank for itself", "machinery/run", "result, error = broadcast_object((result, error))", "pass",
       LAST + "31_rank_0_reads_and_decides")
mutant("resume: sums of the log forgotten", "machinery/run", 'self.meter.restore(checkpoint["log"])', "pass", f"{BITWISE}[single-1-9]")
SHARE = "of[get_rank()] if same else sum(of) * (get_rank() == 0)"
mutant("resume: sums of all ranks restored on every rank", "common", SHARE, "sum(of)", f"{BITWISE}[ddp-2-9]")
mutant("resume: sums of the ranks put together", "common", SHARE, "sum(of) * (get_rank() == 0)",
       "training_math::test_sums_of_ranks_go_back_to_the_ranks")
mutant("average: never evaluated", "machinery/run", "if not state.average.n_averaged:", "if True:",
       "survivors::test_ema_and_swa_are_what_they_say")
mutant("swa: from the first epoch", "common", "self.n_averaged < swa_epochs(self.epochs, epoch + 1)", "self.n_averaged < epoch + 1",
       "survivors::test_ema_and_swa_are_what_they_say")
mutant("log: not cut back", "machinery/files", "self.log.truncate(self._bytes_before(checkpoint))", "pass",
       "checkpoint::test_log_is_cut_back_to_the_checkpoint_even_if_its_last_line_is_torn")
mutant("log: evaluation after the checkpoint kept", "machinery/files", 'entry["epoch"] < checkpoint["epoch"]',
       'entry["epoch"] <= checkpoint["epoch"]', "survivors::test_evaluation_after_the_checkpoint_is_logged_once")
mutant("log: --eval-only cuts it", "machinery/files", "        if not args.eval_only:\n            best =",
       "        if True:\n            best =",
       "odd_tasks::test_eval_only_does_not_touch_the_log_of_a_run")
mutant("log: skipped steps counted twice", "machinery/run", "        state.scaler.skipped.zero_()\n", "", f"{NAN}[ddp-2]")
mutant("log: loss of the whole run", "machinery/run", "        self.meter.clear()\n", "",
       "survivors::test_logged_loss_is_that_since_the_last_line")
mutant("lock: none", "machinery/files", "fcntl.flock(self.log, fcntl.LOCK_EX | fcntl.LOCK_NB)", "pass", LAST + "31_rank_0_reads_and_decides")
mutant("schedule: stands still when a step is skipped", "train_ddp", "        state.scheduler.step()\n",
       "        if not state.scaler.in_a_row:\n            state.scheduler.step()\n", MANY + "22_skipped_steps_are_counted")
mutant("divergence: never ends", "machinery/run", "state.scaler.in_a_row >= MAX_SKIPPED_IN_A_ROW", "False", DIVERGED)
mutant("divergence: another exit code", "machinery/run", 'raise Stopped(3, f"diverged', 'raise Stopped(1, f"diverged', DIVERGED)
mutant("stop: every rank by itself", "machinery/run", "flag = int(agreed[1]) if agreed else 0", "flag = self.received", ONE + "11_sigterm_saves[0]")
mutant("stop: only if all ranks were told", "machinery/run", "dist.ReduceOp.MAX, async_op", "dist.ReduceOp.MIN, async_op",
       ONE + "11_sigterm_saves[0]")
mutant("stop: signals of the ranks added", "machinery/run", "dist.ReduceOp.MAX, async_op", "dist.ReduceOp.SUM, async_op",
       "survivors::test_signal_to_all_ranks_is_one_signal")
mutant("stop: without saving", "machinery/run", "if self.files:\n            plain", "if self.files and not self.stopping:\n            plain", f"{BITWISE}[single-1-9]")
mutant("stop: Ctrl-C before training is left to Python", "machinery/processes", "signal.signal(signal.SIGINT, signal.SIG_DFL)", "None",
       "signals::test_ctrl_c_while_ranks_start_is_answered_without_a_traceback")
mutant("stop: SIGTERM ends with 0", "machinery/processes", "signal.SIGTERM: 143", "signal.SIGTERM: 0", ONE + "11_sigterm_saves[0]")
mutant("stop: SIGINT ends with 143", "machinery/processes", "signal.SIGINT: 130", "signal.SIGINT: 143",
       LAST + "39_nothing_outlives_the_launcher[SIGINT]")
mutant("stop: SIGUSR1 ends with 138", "machinery/processes", "signal.SIGUSR1: 0", "signal.SIGUSR1: 138",
       "survivors::test_signal_to_all_ranks_is_one_signal")
