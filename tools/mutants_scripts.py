"""Mutants of the four scripts."""

from mutants_base import BITWISE, EQUAL, FEATURE, LR, MASKS, NAN, SCALE_LR, mutant

# One fault takes two or three lines here, and not seven.
# fmt: off

# -------------------------------------------------------------------------------------------------------------------------- several scripts

WRAP = "model = DistributedDataParallel(net, find_unused_parameters=args.find_unused_parameters, gradient_as_bucket_view=True)"
SCALED = "loss = losses.sum() * (dist.get_world_size() / args.batch_size)"
STEP = "state.scaler.step(state.optimizer)"
SYNC = "        common.sync_buffers(net)\n"
SAMPLER = "args.balanced, rank, world_size"
SETTLE = "    common.settle_buckets(model, task.per_sample_loss, train_loader, args.amp)\n"
CONVERT = "net = convert_sync_batchnorm(net, device) if args.sync_bn else net"

for mode, two, uneven in (("ddp", f"{EQUAL}[ddp-2-1]", f"{EQUAL}[ddp-2-2]"), ("spawn", f"{EQUAL}[spawn-2-1]", f"{EQUAL}[spawn-2-2]")):
    script, masks, nan = f"train_{mode}", f"{MASKS}[{mode}-2]", f"{NAN}[{mode}-2]"
    resumed = f"{BITWISE}[spawn-3-9]" if mode == "spawn" else "test_resume_on_three_ranks_is_bitwise"
    sync_bn = f"test_sync_bn_with_accumulation_equals_one_device[{mode}-2]"
    mutant(f"{mode}: no wrapper", script, WRAP, "model = net", two)
    mutant(f"{mode}: world size missing in the loss", script, SCALED, "loss = losses.sum() / args.batch_size", two)
    mutant(f"{mode}: mean of the ranks' means", script, SCALED, "loss = losses.mean() / args.accum_steps", uneven)
    mutant(f"{mode}: every rank trains on the whole batch", script, SAMPLER, "args.balanced", two)
    mutant(f"{mode}: dropout seed without the rank", script, "state.global_step, i, dist.get_rank())", "state.global_step, i)", masks)
    mutant(f"{mode}: dropout seed without the micro-batch", script, "state.global_step, i, dist", "state.global_step, 0, dist", masks)
    mutant(f"{mode}: dropout seed repeats every epoch", script, "args.seed, state.global_step, i", "args.seed, state.step, i", masks)
    mutant(f"{mode}: NaN is not skipped", script, STEP, "state.optimizer.step()", nan)
    mutant(f"{mode}: buffers not synchronised", script, SYNC, "", f"test_batchnorm_buffers_are_evaluated_alike[{mode}]")
    mutant(f"{mode}: --sync-bn ignored", script, CONVERT, "net = net", sync_bn)
    mutant(f"{mode}: buckets not settled", script, SETTLE, "", resumed)
    mutant(f"{mode}: gradients kept after the step", script, "        state.optimizer.zero_grad(set_to_none=True)\n", "", two)
UNSCALE = "        state.scaler.unscale_(state.optimizer)\n"
CLIP = "        common.clip_grad_norm(state.net, args.clip_grad_norm, state.scaler.norm)\n"
NORM = "        state.scaler.norm = nn.utils.get_total_norm([p.grad for p in state.net.parameters() if p.grad is not None])\n"
PLAIN = {"single": "loss = losses.sum() / args.batch_size", "dp": 'loss = values["loss"].sum() / args.batch_size'}
SEED = "seed_rng(args.seed, state.global_step, i)"

for mode, n in (("single", 1), ("dp", 2)):
    script, masks = f"train_{mode}", f"{MASKS}[{mode}-{n}]"
    accumulated = "test_accumulation_on_one_device[2]" if mode == "single" else f"{EQUAL}[dp-2-2]"
    mutant(f"{mode}: mean over the micro-batch", script, PLAIN[mode], PLAIN[mode].replace("sum() / args.batch_size", "mean()"), accumulated)
    mutant(f"{mode}: dropout seed without the step", script, SEED, "seed_rng(args.seed, 0, i)", masks)
    mutant(f"{mode}: dropout seed without the micro-batch", script, SEED, "seed_rng(args.seed, state.global_step, 0)", masks)
    mutant(f"{mode}: NaN is not skipped", script, STEP, "state.optimizer.step()", f"{NAN}[{mode}-{n}]")
    mutant(f"{mode}: clipped before unscaling", script, UNSCALE + CLIP, NORM + CLIP + UNSCALE,
           "test_loss_scale_leaves_no_trace[" + f"{mode}-{n}]")
    mutant(f"{mode}: unscale_ missing", script, UNSCALE, NORM, f"test_loss_scale_leaves_no_trace[{mode}-{n}]")
    mutant(f"{mode}: model stays in evaluation mode", script, "    common.train_mode(model)\n", "", masks)
    mutant(f"{mode}: model evaluated in training mode", script, "    model.eval()\n", "", masks)

for mode, n in (("dp", 2), ("ddp", 3), ("spawn", 2)):
    mutant(f"{mode}: statistics of the average not estimated", f"train_{mode}",
           'run.save("last.pt")\n        eval_model = run.eval_model(train_loader)',
           'run.save("last.pt")\n        eval_model = average.module if average.n_averaged else net',
           f"test_swa_statistics_are_the_same_in_every_mode[{mode}-{n}-{'others0' if mode == 'dp' else 'None'}]")

for mode in ("single", "dp", "ddp", "spawn", "fsdp"):
    mutant(f"{mode}: options not checked", f"train_{mode}", "    check_run(args, task, train_set, val_set, net)", "    str()",
           f"test_script_alone_checks_too[{mode}]")
mutant("ddp: the model stays on the CPU", "train_ddp", "    net.to(device)\n", "", "test_pitfall_17_device_is_chosen_before_anything_else")

for mode in ("single", "dp", "ddp", "spawn"):
    n = {"single": 1, "dp": 2, "ddp": 2, "spawn": 3}[mode]
    mutant(f"{mode}: not saved before the evaluation", f"train_{mode}", '        run.save("last.pt")', "        str()",
           *([f"test_interrupted_evaluation_is_made_again_and_the_same[{mode}-{n}-9]"] if mode in ("single", "ddp") else
             [f"test_run_is_saved_before_each_evaluation[{mode}-{n}]"]))
    mutant(f"{mode}: evaluation not seeded", f"train_{mode}", "seed_evaluation(args.seed, i)", "str()",
           f"test_evaluation_repeats_what_it_draws[{mode}-{n}]")
    mutant(f"{mode}: leaves traces in the process", f"train_{mode}", "@leaves_no_trace", "@(lambda main: main)",
           "test_every_main_leaves_no_trace")

for mode in ("single", "dp", "ddp", "spawn"):
    mutant(f"{mode}: norm after clipping is logged", f"train_{mode}", "run.end_step(state.scaler.norm)",
           "run.end_step(state.scaler.norm.clamp(max=args.clip_grad_norm))",
           "test_every_mode_logs_the_norm_of_the_whole_gradient_before_clipping")
    mutant(f"{mode}: evaluated before it is saved", f"train_{mode}",
           'run.save("last.pt")', "pass",
           f"test_training_is_saved_before_its_evaluation_and_the_epoch_after_it[{mode}-{1 if mode == 'single' else 2}]")

# -------------------------------------------------------------------------------------------------------------------------- train_single.py

ADD = "            run.meter.add(loss=losses, **task.train_metrics(outputs, targets))\n"
mutant("single: schedule stepped per micro-batch", "train_single", ADD, ADD + "            state.scheduler.step()\n", f"{LR}[constant]")
mutant("single: loss of the last micro-batch alone is logged", "train_single", ADD,
       "            run.meter.clear()\n" + ADD,
       "test_accumulation_on_one_device[2]")

for mode in ("single",):
    mutant(f"{mode}: an average evaluated without its statistics", f"train_{mode}",
           "if args.eval_only:\n        eval_model = run.eval_model(train_loader)",
           "if args.eval_only:\n        eval_model = average.module if average.n_averaged else net",
           "test_evaluation_of_a_checkpoint_from_before_its_evaluation_is_that_evaluation")

# ------------------------------------------------------------------------------------------------------------------------------ train_dp.py

mutant("dp: mean of the replicas' means", "train_dp", PLAIN["dp"],
       "loss = sum(piece.mean() for piece in values['loss'].chunk(args.replicas)) / args.replicas", "test_pitfall_29_data_parallel_gathers_losses")
mutant("dp: loss computed outside the replicas", "train_dp", "values = model(inputs, targets)",
       "values = {'loss': task.per_sample_loss(state.net(inputs), targets)}", "test_pitfall_29_data_parallel_gathers_losses")
mutant("dp: replicas not counted in --scale-lr", "train_dp", "common.scale_lr(optimizer, args.scale_lr, args.replicas)",
       "common.scale_lr(optimizer, args.scale_lr)", f"{SCALE_LR}[dp-linear-4]")
EVALUATE = "run.end_epoch(evaluate(args, task, eval_model, val_loader, device))"
mutant("dp: evaluates the weights, not their average", "train_dp", EVALUATE, EVALUATE.replace("eval_model", "net"),
       f"{FEATURE}[dp-3-ema]")

# ----------------------------------------------------------------------------------------------------------------------------- train_ddp.py

LAST_ONE = "model.require_backward_grad_sync = i == args.accum_steps - 1"
mutant("ddp: nothing is synchronised", "train_ddp", LAST_ONE, "model.require_backward_grad_sync = False", f"{EQUAL}[ddp-2-1]")
mutant("ddp: the first micro-batch is synchronised", "train_ddp", LAST_ONE, "model.require_backward_grad_sync = i == 0", f"{EQUAL}[ddp-2-2]")
mutant("ddp: every micro-batch is synchronised", "train_ddp", LAST_ONE, "model.require_backward_grad_sync = True",
       "test_pitfall_09_accumulation_synchronises_the_last_piece")
FORWARD = """            seed_rng(args.seed, state.global_step, i, dist.get_rank())
            with common.autocast(run.device, args.amp):
                outputs = model(inputs)
                losses = task.per_sample_loss(outputs, targets)
"""
mutant("ddp: synchronisation decided after the forward", "train_ddp", f"            {LAST_ONE}\n{FORWARD}", f"{FORWARD}            {LAST_ONE}\n",
       "test_pitfall_09_accumulation_synchronises_the_last_piece")
mutant("ddp: clipped before unscaling", "train_ddp", UNSCALE + CLIP, NORM + CLIP + UNSCALE, "test_pitfall_21_clipping_sees_the_true_gradient")
mutant("ddp: unscale_ missing", "train_ddp", UNSCALE, NORM, "test_pitfall_21_clipping_sees_the_true_gradient")
mutant("ddp: schedule stepped per micro-batch", "train_ddp", ADD, ADD + "            state.scheduler.step()\n",
       "test_pitfall_24_schedule_counts_global_batches")
mutant("ddp: a rank leaves its own NaN out", "train_ddp", f"            {SCALED}",
       f"            if not losses.isfinite().all():\n                continue\n            {SCALED}", "test_pitfall_05_nan_on_one_rank")
mutant("ddp: evaluates the weights, not their average", "train_ddp", EVALUATE, EVALUATE.replace("eval_model", "net"),
       f"{FEATURE}[ddp-3-ema]")
mutant("ddp: every rank evaluates everything", "train_ddp",
       "ShardSampler(len(val_set), args.eval_batch_size, rank, world_size)",
       "ShardSampler(len(val_set), args.eval_batch_size)", "test_pitfall_19_all_ranks_evaluate")
mutant("ddp: @record missing", "train_ddp", "@record  # torchrun\n", "",
       "test_pitfall_41_torchrun_shows_the_cause")
mutant("ddp: --timeout not handed on", "train_ddp", "timeout(args.timeout), world_size", "None, world_size",
       "test_timeout_reaches_the_process_group[ddp-2]")
mutant("ddp: --find-unused-parameters ignored", "train_ddp", "find_unused_parameters=args.find_unused_parameters, ", "",
       "test_pitfall_28_unused_parameters")
mutant("ddp: --grad-compress ignored", "train_ddp", "    common.compress_gradients(model, args.grad_compress, scaler)\n", "",
       "test_compressed_gradients_differ_by_their_rounding[bf16]")
mutant("schedule: stands still when a step is skipped", "train_ddp", "        state.scheduler.step()\n",
       "        if not state.scaler.in_a_row:\n            state.scheduler.step()\n", "test_pitfall_22_skipped_steps_are_counted")

# --------------------------------------------------------------------------------------------------------------------------- train_spawn.py

mutant("spawn: --timeout not handed on", "train_spawn", "timeout(args.timeout), world_size", "None, world_size",
       "test_timeout_reaches_the_process_group[spawn-2]")
mutant("spawn: local rank for rank", "train_spawn", "rank = args.node_rank * args.nproc + local_rank", "rank = local_rank",
       "test_pitfall_40_two_launchers_are_one_job")
