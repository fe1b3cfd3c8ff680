"""The mutants: each is one fault that a person could make, and the tests that should notice it.

Write `mutant(name, file, old, new, *tests)`. `old` stands exactly once in `file`.py and becomes
`new`. A test is named without its file; the one that fails soonest comes first.
"""

from __future__ import annotations

LIST: list[tuple[str, str, str, str, tuple[str, ...]]] = []


def mutant(name: str, file: str, old: str, new: str, *tests: str) -> None:
    LIST.append((name, f"{file}.py", old, new, tests))


# One fault takes one or two lines here, and not seven.
# fmt: off

# Tests of three mutants or more
AUGMENTED = "test_a_sample_is_augmented_alike_whoever_loads_it"
AVERAGES = "test_ema_is_what_it_says"
BITWISE = "test_interrupted_and_resumed_run_is_bitwise_the_uninterrupted_one"
BLAME = "test_end_of_a_run_is_told_by_the_rank_that_is_to_blame"
CHANGED = "test_changed_option_that_would_change_the_run_is_refused_by_name"
DIVERGED = "test_ten_skipped_steps_in_a_row_end_the_run"
IN_A_ROW = "test_steps_in_a_row_count_at_the_lowest_scale_and_since_the_last_good_step"
FIRST_STEP = "test_skipped_first_step_of_any_optimizer_leaves_no_trace"
NO_TRACE = "test_skipped_step_leaves_no_trace_in_batchnorm"
DURABLE = "test_files_of_a_save_are_on_the_disk_before_they_appear"
EMPTY = "test_steps_without_any_weight_change_nothing_and_end_nothing[ddp-2]"
EQUAL = "test_mode_equals_one_device"
GATHERED = "test_gathered_samples_are_those_of_all_ranks_and_gradients_go_back"
MASKS = "test_dropout_is_that_of_ddp"
METER = "test_meter_is_the_exact_mean_over_uneven_and_empty_shards"
NAN = "test_nan_is_skipped_in_every_mode"
OPTIMIZER = "test_options_reach_the_optimizer"
PIECES = "test_pieces_of_all_ranks_partition_each_global_batch"
REFUSED = "test_bad_input_is_refused_by_name"
SCALE_LR = "test_scale_lr_multiplies_by_the_world_size_only_when_asked"
SHARDED = "test_shards_equal_one_device"
SHARDS = "test_pitfall_01_evaluation_counts_every_sample_once"
SKIP = "test_scaler_skips_and_counts_non_finite_gradients_at_every_precision"
SPEED = "test_speed_is_the_samples_since_the_last_line_over_the_seconds_since"
SYNC_BN = "test_equals_batchnorm_on_the_whole_batch"
TOKENS = "test_real_work_equals_one_device[tokens-ddp-2-1-13]"
TRACES = "test_main_can_be_called_from_a_notebook_or_a_thread_and_leaves_no_trace"

# common.py: the ranks, the meter, the model

mutant("sampler: strided micro-batches", "sampling", "micro_batches = np.array_split(batch, self.accum_steps)",
       "micro_batches = [batch[i :: self.accum_steps] for i in range(self.accum_steps)]", "test_micro_batches_of_all_ranks_are_those_of_one_device")
mutant("gather: no gradient for others", "common", "total = reduce_value(gradient.float() if gradient.itemsize < 4 else gradient, average=False)",
       "total = gradient", GATHERED)
mutant("gather: padding stays", "common", "part[:size] for part, size in zip(parts, sizes)", "part for part in parts", GATHERED)
mutant("gather: every rank is the first", "common", "sum(sizes[: dist.get_rank()])", "0", GATHERED, "test_real_work_equals_one_device[clip-ddp-2-3-13]")
mutant("gather: in evaluation too", "common", " or not torch.is_grad_enabled():", ":", GATHERED)
mutant("weights: of this rank alone", "machinery/usertask", "common.reduce_value(torch.stack(sums).sum(), average=False)", "torch.stack(sums).sum()", TOKENS)
mutant("weights: of the last micro-batch", "machinery/usertask", "torch.stack(sums).sum()", "sums[-1]", "test_real_work_equals_one_device[pixels-ddp-2-3-13]")
mutant("weights: in single precision", "machinery/usertask", '(targets).to(getattr(torch, self.args.dtype))', "(targets).float()", TOKENS,
       "test_first_step_is_that_of_a_plain_program[tokens]")
mutant("weights: the log divides by samples", "machinery/usertask", 'return (losses, self._weights(targets)) if "loss_weights" in self.functions else losses',
       "return losses", "test_first_step_is_that_of_a_plain_program[tokens]")
mutant("weights: an empty step is NaN", "machinery/usertask", "torch.where(total == 0, torch.inf, total)", "total", EMPTY)
mutant("meter: weights ignored", "common", "totals.get(name + WEIGHT, count)", "count", METER)
mutant("collate: of the task is not called", "machinery/usertask", 'self.functions.get("collate")', "None", TOKENS)
mutant("to_device: objects stay", "common", 'lambda value: hasattr(value, "to")', "torch.is_tensor", "test_what_has_to_is_moved")
mutant("check: neighbours are not asked", "machinery/usertask", "check_neighbours(task, net, device, val)", "pass",
       f"{REFUSED}[ddp-2 --task TMP/loss-of-all.py --dtype float64]")
mutant("check: slices of one are not tried", "machinery/usertask", "check_smallest_slice(task, net, device, train)", "pass",
       f"{REFUSED}[single-1 --task TMP/norm.py --batch-size 2 --accum-steps 2]")
mutant("check: dp gathers", "machinery/usertask", 'args.parallel_mode == "dp" and common.gather_samples.used', "False", "test_dp_says_what_it_cannot_do[clip-dp-dp cannot gather_samples; use ddp or spawn]")
mutant("reduce_value: a sum for a mean", "common", "value = value / dist.get_world_size() if average else value", "pass",
       "test_reduce_value_sums_or_averages_over_the_ranks_out_of_place")
mutant("reduce_value: in place", "common", "value = value.detach().clone()", "value = value.detach()",
       "test_reduce_value_sums_or_averages_over_the_ranks_out_of_place")
mutant("meter: local means, not reduced", "common", "reduce_value(sums, average=False).tolist()", "sums.tolist()", METER)
mutant("meter: ranks averaged", "common", "reduce_value(sums, average=False)", "reduce_value(sums)", METER)
mutant("meter: a mean of means", "common", "for name in self.names]).sum(1", "for name in self.names]).mean(1", METER)
mutant("meter: count lost at resume", "common", 'int(share.pop("count"))', 'share.pop("count") * 0', "test_sums_of_ranks_go_back_to_the_ranks")
mutant("resume: sums of all ranks restored on every rank", "common", "of[get_rank()] for name, of in sums.items()", "sum(of) for name, of in sums.items()",
       f"{BITWISE}[ddp-2-9]")
mutant("sync_buffers: no broadcast", "common", "dist.broadcast(sent, src=0)", "pass", "test_batchnorm_buffers_are_evaluated_alike[ddp]")
mutant("sync_buffers: weights not compared", "common", "zip(names, largest, smallest) if a != b", "[]", "test_drift_of_any_parameter_on_any_rank_is_named")
mutant("drift: of the first parameter only", "common", "for p in net.parameters()]\n    sums", "for p in list(net.parameters())[:1]]\n    sums",
       "test_drift_of_any_parameter_on_any_rank_is_named")
mutant("launch: every rank prints", "common", "    if get_rank() == 0:\n        print(", "    if True:\n        print(",
       "test_pitfall_37_one_rank_prints_and_writes")
mutant("compression: bf16 sent as fp16", "common", 'f"{method}_compress_hook"', '"fp16_compress_hook"', "test_compressed_gradients_differ_by_their_rounding[bf16]")
mutant("amp: never on", "common", 'enabled=amp != "off"', "enabled=False", "test_amp_computes_in_its_type[bf16]")
mutant("freeze: has no effect", "common", "parameters[name].requires_grad_(False)", "parameters[name].requires_grad_(True)", "test_training_is_not_trivial")
mutant("freeze: all may be frozen", "common", "if frozen == len(parameters):", "if False:", REFUSED)
mutant("freeze: BatchNorm keeps learning", "common", "norm.eval()", "pass", "test_frozen_batchnorm_keeps_its_statistics[ddp-2]")
mutant("weights: not loaded", "common", "loaded.update(fits)", "", "test_weights_of_another_network_are_loaded_as_far_as_they_fit_and_the_rest_is_named")
mutant("weights: prefixes kept", "common", 'if part not in ("module", "_orig_mod"))', ")",
       "test_weights_of_another_network_are_loaded_as_far_as_they_fit_and_the_rest_is_named")
mutant("weights: NaN accepted", "common", "if bad:", "if False:", "test_weights_that_do_not_fit_at_all_or_are_damaged_are_refused")

# common.py: the optimizer, the rate, the steps, the average

mutant("optimizer: --weight-decay of AdamW ignored", "common", "betas, weight_decay=weight_decay", "betas", OPTIMIZER)
mutant("optimizer: --weight-decay of SGD ignored", "common", '"weight_decay": weight_decay, ', "", OPTIMIZER)
mutant("optimizer: --nesterov ignored", "common", ', "nesterov": nesterov', "", OPTIMIZER)
mutant("learning rate: always scaled", "common", "[rule]", '["linear"]', f"{SCALE_LR}[ddp-none-1]")
mutant("learning rate: root of N not taken", "common", '"sqrt": math.sqrt(devices)', '"sqrt": devices', f"{SCALE_LR}[ddp-sqrt-2]")
mutant("warm-up: off by one", "common", "factor * (step + 1) / start", "factor * step / start", "test_warmup_rises_linearly_to_the_peak")
mutant("cosine: ends after the run", "common", "(step - start) / max(1, end - start)", "(step - start) / end", "test_cosine_falls_from_one_to_zero_after_the_warmup")
mutant("step: drops one step late", "common", "bisect.bisect_right(", "bisect.bisect_left(", "test_step_drops_at_the_given_epochs")
mutant("cyclic: one cycle only", "common", "((step - start) % cycle + ended)", "(step - start + ended)", "test_cyclic_schedule_has_no_cliff")
mutant("schedule: the final rate is forgotten", "common", "low = step_gamma if schedule in USE_MARKS else final_lr",
       "low = step_gamma if schedule in USE_MARKS else 0.0", "test_cosine_falls_to_the_final_rate")
mutant("clipping: limit ignored", "common", "if limit is not None:", "if False:", "test_clip_grad_norm_looks_at_the_whole_gradient[0.1]")
mutant("clipping: tensor by tensor", "common", "nn.utils.clip_grads_with_norm_(net.parameters(), limit, norm)",
       "[nn.utils.clip_grad_norm_(parameter, limit) for parameter in net.parameters()]", "test_clip_grad_norm_looks_at_the_whole_gradient[0.1]")
mutant("scaler: not unscaled", "common", "        self.grad_scaler.unscale_(optimizer)\n", "", "test_scaler_gives_the_true_gradient[1024.0]")
mutant("scaler: the norm is looked at", "common", "_unscale_(gradients,", "_unscale_([nn.utils.get_total_norm(gradients)],", "test_gradient_whose_norm_overflows_is_a_step")
mutant("scaler: scale of fp16 fixed", "common", 'enabled=amp == "fp16"', "enabled=False", f"{SKIP}[nan-fp16]")
mutant("scaler: skipped steps not counted", "common", "self.skipped += self.bad", "pass", f"{SKIP}[nan-off]")
mutant("scaler: in a row is never reset", "common", "self.in_a_row, self.bad)", "self.in_a_row, self.one)",
       "test_skipped_steps_that_are_not_in_a_row_end_no_run")
mutant("scaler: steps that lower the scale count", "common", "(self.scale(self.one) <= 1)", "(self.scale(self.one) > 0)", f"{IN_A_ROW}[fp16]")
mutant("scaler: a batch without weight makes a step", "common", "self.bad = torch.where(total == math.inf, self.one, self.bad)", "pass", f"{IN_A_ROW}[off]")
mutant("scaler: momentum is not made", "common", "optimizer.state[parameter].setdefault(", "dict().setdefault(", f"{FIRST_STEP}[fused]")
mutant("scaler: a group that is not fused makes the step", "common", 'g.get("fused", True) and not g', "not g", f"{FIRST_STEP}[one group is not fused]")
mutant("scaler: dampening begins with zero", "common", ' and not g.get("dampening")', "", f"{FIRST_STEP}[dampening]")
mutant("scaler: a fused step with a NaN is made", "common", "= None, self.bad", "= None, None", "test_guard_of_a_fused_step_reads_nothing_and_computes_little")
mutant("scaler: a NaN stays in BatchNorm", "common", "torch.where(skip, kept, now, out=kept)", "kept.copy_(now)", f"{NO_TRACE}[off-BatchNorm1d]")
mutant("scaler: statistics that a forward assigns stay", "common", "append((module._buffers, name))", "append(({name: buffer}, name))", f"{NO_TRACE}[off-Assigns]")
mutant("scaler: a call of torch for each gradient", "common", "torch._amp_foreach_non_finite_check_and_unscale_(gradients, self.bad, self.one)",
       "[torch._amp_foreach_non_finite_check_and_unscale_([g], self.bad, self.one) for g in gradients]",
       "test_step_calls_torch_little_more_often_than_a_bare_one")
mutant("scaler: steps in a row forgotten at resume", "common", 'self.in_a_row.fill_(state["in_a_row"])', "pass", f"{SKIP}[nan-off]")
mutant("ema: another decay", "common", "(1 + n) / (10 + n)", "(1 + n) / (9 + n)", AVERAGES)
mutant("ema: statistics not averaged", "common", "ids |= {id(norm.running_mean), id(norm.running_var)}", "pass", AVERAGES)

# common.py: checkpoint files

mutant("save: file not on the disk before the rename", "common", "os.fsync(file.fileno())", "pass", DURABLE)
mutant("save: name not on the disk", "common", "os.fsync(directory)", "pass", DURABLE)
mutant("save: written over the old file", "common", "os.replace(temporary, path)", "path.write_bytes(temporary.read_bytes())", DURABLE)
mutant("save: half a file stays behind", "common", "temporary.unlink(missing_ok=True)", "pass", "test_failed_save_leaves_the_last_checkpoint[last.pt]")
mutant("load: runs code in the file", "common", "weights_only=True)", "weights_only=False)", "test_hostile_checkpoint_is_refused_in_one_line_and_does_not_run")
mutant("load: checksums not tested", "common", "damaged := file.testzip()", "damaged := None", "test_damaged_file_is_named_and_the_run_goes_on_from_another_one[flipped]")
mutant("load: to the device that saved it", "common", 'map_location="cpu",', "", "test_pitfall_17_device_is_chosen_before_anything_else")
mutant("load: format not looked at", "common", 'or checkpoint.get("format") != FORMAT', "", "test_checkpoint_of_another_format_is_refused")

# sampling.py

mutant("order: the same every epoch", "sampling", "splitmix64(seed, epoch, -1)", "splitmix64(seed, 0, -1)", "test_order_is_a_function_of_seed_and_epoch")
mutant("order: without the seed", "sampling", "splitmix64(seed, epoch, -1)", "splitmix64(0, epoch, -1)", "test_order_is_a_function_of_seed_and_epoch")
mutant("order: seed 1, epoch 0 is seed 0, epoch 1", "sampling", "splitmix64(seed, epoch, -1)", "splitmix64(seed + epoch, -1)",
       "test_order_is_a_function_of_seed_and_epoch")
mutant("sampler: a resumed epoch starts anew", "sampling", "range(step, self.steps_per_epoch)", "range(self.steps_per_epoch)",
       "test_resuming_at_any_step_yields_exactly_the_rest[1]")
mutant("sampler: all ranks take the same piece", "sampling", "np.array_split(m, self.world_size)[self.rank]", "np.array_split(m, self.world_size)[0]",
       f"{PIECES}[2]")
mutant("sampler: strided pieces", "sampling", "np.array_split(m, self.world_size)[self.rank]", "m[self.rank :: self.world_size]", f"{PIECES}[2]")
mutant("sampler: torch.chunk, which may leave a rank without samples", "sampling", "np.array_split(m, self.world_size)[self.rank]", "m[self.rank * -(-len(m) // self.world_size) :][: -(-len(m) // self.world_size)]",
       f"{PIECES}[4]")
mutant("sampler: micro-batches cut after the ranks", "sampling", "np.array_split(batch, self.accum_steps)", "[batch]",
       "test_micro_batches_of_all_ranks_are_those_of_one_device[2-2]")
mutant("sampler: the ragged tail is kept", "sampling", "steps_per_epoch = length // batch_size", "steps_per_epoch = math.ceil(length / batch_size)", f"{PIECES}[2]")
mutant("sampler: an empty epoch is accepted", "sampling", "if batch_size > length:", "if False:", "test_pitfall_26_ranks_have_equally_many_batches")
mutant("balanced: every sample equally often", "sampling", "if classes is None:", "if True:", "test_balanced_draws_every_class_equally_often_and_every_sample_of_it")
mutant("evaluation: shards padded to the same length", "sampling", "min(start + self.batch_size, self.length)", "start + self.batch_size", SHARDS)
mutant("evaluation: every rank starts at sample 0", "sampling", "[rank::world_size]", "[0::world_size]", SHARDS)
mutant("evaluation: the last batch is dropped", "sampling", "self.steps = range(0, length, self.batch_size)[",
       "self.steps = range(0, length - self.batch_size + 1, self.batch_size)[", SHARDS)
mutant("evaluation: ranks draw alike", "sampling", "i * world_size + rank)", "i)  # no",
       "test_pitfall_49_what_is_drawn_in_an_evaluation_is_the_same_in_every_mode[ddp-2]")
mutant("augmentation: no seed per sample", "sampling", "seed_generators(sample_key(index))", "pass", f"{AUGMENTED}[3-1-0-per sample]")
mutant("augmentation: per-sample seed without the epoch", "sampling", "splitmix64(KeyedDataset.key, index)", "splitmix64(0, index)",
       f"{AUGMENTED}[0-3-0-per sample]")
mutant("augmentation: per-sample seed without the index", "sampling", "seed_generators(sample_key(index))", "seed_generators(sample_key(0))",
       "test_repeated_samples_of_whole_batches_draw_differently")
mutant("augmentation: the epoch is not told", "sampling", "KeyedDataset.key = splitmix64(self.seed, epoch, 0)", "self.key = splitmix64(self.seed, epoch, 0)",
       f"{AUGMENTED}[0-3-0-in memory]")
mutant("augmentation: keys without the seed", "sampling", "KeyedDataset.key = splitmix64(self.seed, epoch, 0)", "KeyedDataset.key = splitmix64(0, epoch, 0)",
       "test_default_task_augments_by_the_seed_and_only_in_training")
mutant("augmentation: draws without the key", "sampling", "splitmix64(KeyedDataset.key, keys", "splitmix64(0, keys",
       "test_keyed_uniform_is_uniform_and_depends_on_everything")
mutant("seeds: torch and numpy draw alike", "sampling", "np.random.seed(splitmix64(bits, 2) % 2**32)", "np.random.seed(bits % 2**32)", "test_generators_have_streams_of_their_own")
mutant("balanced: repeats are augmented alike", "sampling", "order + length * times", "order", "test_sample_that_comes_again_is_augmented_anew")
mutant("workers: eight for whole batches beside a GPU", "sampling", "elif in_memory and keyed.whole_batches:", "elif False:", "test_default_number_of_workers")
mutant("loader: batches in memory that is used again", "sampling", "tree_map(torch.clone, self.dataset.__getitems__(indices))", "self.dataset.__getitems__(indices)",
       "test_batches_in_memory_that_is_used_again_stay_apart")
mutant("data: sockets that are open go to workers", "machinery/usertask", ' or "/socket:" in p', "", "test_open_file_comes_with_a_warning")
mutant("loader: a worker outlives a rank that dies as it starts", "sampling", "if os.getppid() != multiprocessing.parent_process().pid:", "if False:",
       "test_loader_worker_whose_rank_dies_as_it_starts_ends_too")
mutant("loader: data that can move stay beside the GPU", "sampling", "keyed.dataset = dataset.to(device)", "pass", "test_default_number_of_workers")
mutant("images: the mirror image is another on a device", "tasks/images", "images.flip(3), images)", "images, images.flip(3))",
       "test_images_in_memory_are_the_same_on_a_device")
mutant("subset: repeats are augmented alike", "sampling", "draw = times if self.whole_batches else number", "draw = times", "test_sample_that_comes_again_is_augmented_anew")
mutant("data: files that are open go to workers", "machinery/usertask", "self.args.workers, advice = 0,", "self.args.workers, advice = None,", "test_file_that_a_task_leaves_open_is_read_by_one_process[build_datasets]")
mutant("sync_buffers: views are sent as memory", "common", "buffer.contiguous().view(-1)", "buffer.view(-1)", "test_buffers_of_any_type_and_stride_are_sent")
mutant("fsdp: marks of parameters are lost", "machinery/modes", "vars(parameter).update(marks[name])", "pass", "test_marks_on_parameters_stay_and_hooks_are_refused")
mutant("schedule: sawtooth without its last step", "common", "marks, ended=1)", "marks)", "test_sawtooth_is_that_of_its_source")
mutant("seed_rng: without the step", "sampling", "splitmix64(seed, step, micro_batch) %", "splitmix64(seed, micro_batch) %", "test_what_a_forward_draws_depends_on_its_place_in_the_run")
mutant("seed_rng: without the rank", "sampling", "% 2**63 + rank", "% 2**63", "test_what_a_forward_draws_depends_on_its_place_in_the_run")
mutant("seed_rng: without the seed", "sampling", "splitmix64(seed, step, micro_batch) %", "splitmix64(0, step, micro_batch) %", "test_what_a_forward_draws_depends_on_its_place_in_the_run")
mutant("seeds: without random.seed(bits)", "sampling", "random.seed(splitmix64(bits, 1))", "", f"{AUGMENTED}[3-1-0-per sample]")
mutant("seeds: without torch.default_generator.manual_seed(bits)", "sampling", "torch.default_generator.manual_seed(bits)", "", f"{AUGMENTED}[3-1-0-per sample]")
mutant("data: --skip-corrupt ignored", "sampling", "if not self.skip_corrupt:", "if True:", "test_broken_sample_is_named_or_replaced_alike_everywhere")
mutant("loader: workers started anew every epoch", "sampling", '{"persistent_workers": True,', "{", "test_pitfall_38_workers_stay_and_cores_are_divided")
mutant("loader: workers do not ignore signals", "sampling", "signal.signal(number, signal.SIG_IGN)", "pass", "test_pitfall_11_sigterm_saves")
mutant("workers: load what is not wanted", "sampling", "steps, sampler.steps = sampler.steps, ()", "steps = sampler.steps",
       "test_pitfall_12_resume_within_an_epoch_repeats_nothing")
mutant("devices: all cores for every process", "common", " // max(1, processes)", "", "test_pitfall_38_workers_stay_and_cores_are_divided")

# task.py

mutant("task: augmentation by the place in the batch", "task", "keyed_uniform(indices, 2)", "keyed_uniform(np.arange(len(indices)), 2)",
       f"{AUGMENTED}[0-3-0-in memory]")
mutant("task: held-out images augmented", "task", "Digits(images[1437:], labels[1437:])", "Digits(images[1437:], labels[1437:], shift=1)",
       "test_default_task_augments_by_the_seed_and_only_in_training")
mutant("task: trained on held-out images", "task", "Digits(images[:1437], labels[:1437]", "Digits(images, labels", "test_default_task_augments_by_the_seed_and_only_in_training")
mutant("task: shift to one side only", "task", "(2 * self.shift + 1)", "(self.shift + 1)", "test_digits_are_shifted_by_one_pixel_in_training")
mutant("task: every image mirrored", "tasks/images", "mirrored = draws[:, 2] < 0.5", "mirrored = draws[:, 2] < 1.5",
       "test_arrays_are_augmented_in_training_only[cifar10-32-True]")
mutant("task: label smoothing ignored", "tasks/images", ", label_smoothing=label_smoothing)", ")", "test_label_smoothing_reaches_the_loss")
mutant("task: top1 is the worst guess", "task", '"top1": hits[:, 0]', '"top1": hits[:, -1]', "test_metrics_of_the_default_task")
mutant("folders: test before val", "tasks/images", '["val", "validation", "test"]', '["test", "validation", "val"]', "test_folders_are_classes_and_val_goes_before_test")
mutant("folders: augmented in evaluation", "tasks/images", "pipeline(size, training)", "pipeline(size, True)",
       "test_image_file_is_augmented_by_seed_epoch_and_sample_whoever_loads_it[photographs]")
mutant("photograph: not cropped at random", "tasks/images", "v2.RandomResizedCrop(size), v2", "v2.Resize((size, size)), v2",
       "test_image_file_is_augmented_by_seed_epoch_and_sample_whoever_loads_it[photographs]")
mutant("small image: a larger shift", "tasks/images", "size, size // 8)", "size, size // 4)",
       "test_small_images_are_shifted_by_an_eighth_and_half_of_them_mirrored")
mutant("image file: lower bits of sixteen", "tasks/images", 'if image.mode.startswith(("I", "F")):', "if False:", "test_grey_of_any_depth_is_read_by_its_largest_value[uint16-65535]")
mutant("normalise: not divided", "tasks/images", "- model.pixel_mean) / model.pixel_std,)", "- model.pixel_mean),)",
       "test_network_sees_each_channel_normalised_in_its_precision")
mutant("task: classes without names", "tasks/images", "sets[-1].classes = source.classes", "pass", "test_arrays_are_augmented_in_training_only")

# train_single.py and train_dp.py

STEP, SEED = "state.scaler.step(state.optimizer)", "seed_rng(args.seed, state.global_step, i)"
UNSCALE = "        state.scaler.unscale_(state.optimizer, total)\n"
CLIP = "        norm = common.clip_grad_norm(state.net, args.clip_grad_norm, run.logs_next)\n"
ADD = "            run.meter.add(loss=task.weigh(losses, targets), **task.train_metrics(outputs, targets))\n"
for mode, n, loss, accumulated in (("single", 1, "losses", "test_accumulation_on_one_device[2]"), ("dp", 2, 'values["loss"]', f"{EQUAL}[dp-2-2]")):
    script, masks = f"train_{mode}", f"{MASKS}[{mode}-{n}]"
    mutant(f"{mode}: mean over the micro-batch", script, f"loss = {loss}.sum() / total", f"loss = {loss}.mean()", accumulated)
    mutant(f"{mode}: dropout seed without the step", script, SEED, "seed_rng(args.seed, 0, i)", masks)
    mutant(f"{mode}: NaN is not skipped", script, STEP, "state.optimizer.step()", f"{NAN}[{mode}-{n}]")
    mutant(f"{mode}: clipped before unscaling", script, UNSCALE + CLIP, CLIP + UNSCALE, "test_pitfall_21_clipping_sees_the_true_gradient")
    mutant(f"{mode}: model stays in evaluation mode", script, "common.train_mode(model)", "", masks)
    mutant(f"{mode}: model evaluated in training mode", script, "model.eval()", "", masks)
mutant("single: schedule stepped per micro-batch", "train_single", ADD, ADD + "            state.scheduler.step()\n",
       "test_learning_rate_in_the_log_is_the_function_of_the_step")
mutant("single: loss of the last micro-batch alone is logged", "train_single", ADD, "            run.meter.clear()\n" + ADD, "test_accumulation_on_one_device[2]")
mutant("single: leaves traces in the process", "train_single", "@leaves_no_trace", "@(lambda main: main)", TRACES)
mutant("dp: mean of the replicas' means", "train_dp", 'values["loss"].sum() / total',
       "sum(piece.mean() for piece in values['loss'].chunk(args.replicas)) / args.replicas", "test_pitfall_29_data_parallel_gathers_losses")
mutant("dp: loss computed outside the replicas", "train_dp", "values = model(inputs, targets)",
       "values = {'loss': task.per_sample_loss(state.net(inputs), targets)}", "test_pitfall_29_data_parallel_gathers_losses")
mutant("dp: replicas not counted in --scale-lr", "train_dp", "args.scale_lr, args.replicas)", "args.scale_lr)", f"{SCALE_LR}[dp-linear-4]")
mutant("dp: evaluates the weights, not their average", "train_dp", "metrics = evaluate(args, task, run.eval_model()", "metrics = evaluate(args, task, net",
       "test_feature_equals_one_device[dp-3-ema]")

# train_ddp.py and train_spawn.py

SCALED = "loss = losses.sum() * (dist.get_world_size() / total)"
for mode in ("ddp", "spawn"):
    script, two = f"train_{mode}", f"{EQUAL}[{mode}-2-1]"
    masks = f"{MASKS}[{'dp' if mode == 'ddp' else mode}-2]"
    mutant(f"{mode}: world size missing in the loss", script, SCALED, "loss = losses.sum() / total", two)
    mutant(f"{mode}: every rank trains on the whole batch", script, "args.balanced, rank, world_size", "args.balanced", two)
    mutant(f"{mode}: dropout seed without the rank", script, "state.global_step, i, dist.get_rank())", "state.global_step, i)", masks)
    mutant(f"{mode}: buffers not synchronised", script, "common.sync_buffers(net)", "", f"test_batchnorm_buffers_are_evaluated_alike[{mode}]")
mutant("ddp: no wrapper", "train_ddp", "model = nn.parallel.DistributedDataParallel(", "model = (lambda net, **_: net)(", f"{EQUAL}[ddp-2-1]")
mutant("ddp: mean of the ranks' means", "train_ddp", SCALED, "loss = losses.mean() / args.accum_steps", f"{EQUAL}[ddp-2-2]")
mutant("ddp: gradients kept after the step", "train_ddp", "state.optimizer.zero_grad(set_to_none=True)", "", f"{EQUAL}[ddp-2-1]")
mutant("ddp: NaN is not skipped", "train_ddp", STEP, "state.optimizer.step()", f"{NAN}[ddp-2]")
mutant("ddp: a rank leaves its own NaN out", "train_ddp", f"            {SCALED}",
       f"            if not losses.isfinite().all():\n                continue\n            {SCALED}", "test_pitfall_05_nan_on_one_rank")
mutant("ddp: dropout seed repeats every epoch", "train_ddp", "args.seed, state.global_step, i", "args.seed, state.step, i", f"{MASKS}[single-1]")
mutant("ddp: clipped before unscaling", "train_ddp", UNSCALE + CLIP, CLIP + UNSCALE, "test_pitfall_21_clipping_sees_the_true_gradient")
mutant("ddp: schedule stepped per micro-batch", "train_ddp", ADD, ADD + "            state.scheduler.step()\n", f"{EQUAL}[ddp-2-2]")
mutant("ddp: schedule stands still when a step is skipped", "train_ddp", "        state.scheduler.step()\n",
       "        if not state.scaler.in_a_row:\n            state.scheduler.step()\n", "test_pitfall_22_skipped_steps_are_counted")
LAST = "model.require_backward_grad_sync = i == args.accum_steps - 1"
mutant("ddp: nothing is synchronised", "train_ddp", LAST, "model.require_backward_grad_sync = False", f"{EQUAL}[ddp-2-1]")
mutant("ddp: the first micro-batch is synchronised", "train_ddp", LAST, "model.require_backward_grad_sync = i == 0", f"{EQUAL}[ddp-2-2]")
mutant("ddp: every micro-batch is synchronised", "train_ddp", LAST, "model.require_backward_grad_sync = True", "test_pitfall_09_accumulation_synchronises_the_last_piece")
mutant("ddp: --sync-bn ignored", "train_ddp", " if args.sync_bn else net", " if False else net", "test_sync_bn_with_accumulation_equals_one_device[ddp-2]")
mutant("ddp: --find-unused-parameters ignored", "train_ddp", "find_unused_parameters=args.find_unused_parameters, ", "", "test_pitfall_28_unused_parameters")
mutant("ddp: --grad-compress ignored", "train_ddp", "common.compress_gradients(", "(lambda *_: None)(", "test_compressed_gradients_differ_by_their_rounding[bf16]")
mutant("ddp: buckets not settled", "train_ddp", "common.settle_buckets(", "(lambda *_: None)(", f"{BITWISE}[ddp-3-1]")
mutant("ddp: every rank evaluates everything", "train_ddp", "args.eval_batch_size, rank, world_size)", "args.eval_batch_size)", "test_pitfall_19_all_ranks_evaluate")
mutant("ddp: evaluates the weights, not their average", "train_ddp", "metrics = evaluate(args, task, run.eval_model()", "metrics = evaluate(args, task, net",
       "test_feature_equals_one_device[ddp-3-ema]")
mutant("spawn: local rank for rank", "train_spawn", "rank = args.node_rank * args.nproc + local_rank", "rank = local_rank", "test_pitfall_40_two_launchers_are_one_job")

# train_fsdp.py

CLIPPED = f"{SHARDED}[--accum-steps 3 --clip-grad-norm 0.05 --lr 2-3]"
MESH = "    mesh = mesh_of_ranks(device, args.shard_size)\n"
mutant("fsdp: gradients not scaled", "train_fsdp", "losses.sum() * (dist.get_world_size() / total)", "losses.sum() / total", f"{SHARDED}[-3]")
mutant("fsdp: every rank trains on the whole batch", "train_fsdp", "args.balanced, rank, world_size", "args.balanced", f"{SHARDED}[-3]")
mutant("fsdp: the first micro-batch is synchronised", "train_fsdp", "gradient_sync(i == args.accum_steps - 1)", "gradient_sync(i == 0)", CLIPPED)
mutant("fsdp: the norm of a shard", "common", "get_total_norm([p.grad for p", "get_total_norm([getattr(p.grad, '_local_tensor', p.grad) for p", CLIPPED)
mutant("fsdp: all ranks drop the same units", "train_fsdp", "state.global_step, i, dist.get_rank())", "state.global_step, i)", "test_ranks_of_shards_drop_other_units")
mutant("fsdp: NaN is not skipped", "train_fsdp", STEP, "state.optimizer.step()", "test_nan_on_one_rank_is_skipped_by_all")
mutant("fsdp: sharded after the optimizer", "train_fsdp", MESH,
       "    early = task.build_optimizer(args, net)\n    task = task._replace(build_optimizer=lambda *_: early)\n" + MESH, f"{SHARDED}[-3]")

# All scripts

for mode in ("single", "ddp", "fsdp"):
    mutant(f"{mode}: options not checked", f"train_{mode}", "check_run(task,", "(lambda *_: None)(task,", f"test_script_alone_checks_too[{mode}]")
for mode, n in (("single", 1), ("ddp", 2)):
    mutant(f"{mode}: evaluated before it is saved", f"train_{mode}", 'run.save("last.pt")', "pass",
           f"test_training_is_saved_before_its_evaluation_and_the_epoch_after_it[{mode}-{n}]")
    mutant(f"{mode}: evaluation not seeded", f"train_{mode}", "seed_evaluation(args.seed, i)", "str()", f"test_evaluation_repeats_what_it_draws[{mode}-{n}]")
    mutant(f"{mode}: norm after clipping is logged", f"train_{mode}", "run.end_step(norm)", "run.end_step(norm.clamp(max=args.clip_grad_norm))", "test_every_mode_logs_the_norm_of_the_whole_gradient_before_clipping")

# machinery/run.py

mutant("save: --save-every ignored", "machinery/run", "saves = not ends and (due or self.stopping)", "saves = not ends and self.stopping",
       "test_step_that_ends_the_run_saves_last_alone")
mutant("save: --keep-every one epoch late", "machinery/run", "state.epoch % self.keep_every == 0", "state.epoch % self.keep_every == 1",
       "test_kept_epochs_are_every_so_many")
mutant("save: last.pt before best.pt", "machinery/run", 'self.save(*names, "last.pt")', 'self.save("last.pt", *names)',
       DURABLE)
mutant("save: a run that could not be saved goes on", "machinery/run", "if problem := broadcast_object(problem, self.patient):", "if False:",
       "test_what_became_non_finite_is_never_saved_and_the_run_does_not_end_well[single-1]")
mutant("best: its epoch is not compared", "machinery/run", "(best, best[1], 0)", '(best, found["epoch"], found["step"])', "test_best_pt_that_was_deleted_is_written_anew")
mutant("save: best.pt is the last", "machinery/run", "return gain > 1e-12 * abs(best)", "return True", "test_the_first_of_equal_scores_stays_the_best")
mutant("save: best.pt is the worst", "machinery/run", "return gain > 1e-12", "return gain < 1e-12", "test_best_and_kept_checkpoints")
mutant("best: infinity", "machinery/run", "return math.isfinite(score)", "return not math.isnan(score)", "test_the_first_of_equal_scores_stays_the_best")
mutant("best: highest loss", "machinery/run", 'best == "loss" or best.endswith(":min")', "False", "test_lowest_loss_or_a_named_metric_decides")
mutant("best: the first metric whatever is asked", "machinery/run", "best = self.best_option or known[0]", "best = known[0]", "test_lowest_loss_or_a_named_metric_decides")
mutant("resume: each rank for itself", "machinery/run", "result, error = broadcast_object((result, error), self.patient)", "pass", "test_pitfall_31_rank_0_reads_and_decides")
mutant("resume: sums of the log forgotten", "machinery/run", 'self.meter.restore(checkpoint["log"])', "pass", f"{BITWISE}[single-1-9]")
mutant("average: never evaluated", "machinery/run", "if not self.state.average.n_averaged:", "if True:", AVERAGES)
mutant("divergence: never ends", "machinery/run", "state.scaler.in_a_row >= MAX_SKIPPED_IN_A_ROW", "False", DIVERGED)
mutant("divergence: another exit code", "machinery/run", 'raise Stopped(3, f"diverged: {problem}, seen', 'raise Stopped(1, f"diverged: {problem}, seen', DIVERGED)
mutant("divergence: not seen at the end", "machinery/run", "(logs or saves) and", "((logs and not ends) or saves) and", DIVERGED)
mutant("stop: every rank by itself", "machinery/process", "number = int(reduced)", "pass", "test_stronger_signal_wins_on_whichever_rank")
mutant("stop: only if all ranks were told", "machinery/process", "dist.ReduceOp.MAX, async_op", "dist.ReduceOp.MIN, async_op", "test_stronger_signal_wins_on_whichever_rank")
mutant("stop: without saving", "machinery/run", "if self.files:\n            checkpoint |=", "if self.files and not self.stopping:\n            checkpoint |=",
       f"{BITWISE}[single-1-9]")
mutant("stop: forgotten after an evaluation", "machinery/run", "self.stop.agreed(wait=True) if state.epoch < self.epochs else None", "None",
       "test_interrupted_evaluation_is_made_again_and_the_same[ddp-2-15]")
mutant("signals: the last one wins", "machinery/process", "received.append(PRIORITY.index(number) + 1)", "received[:] = [PRIORITY.index(number) + 1]",
       "test_run_ends_with_the_code_of_the_stronger_signal[single-numbers0-15]")
mutant("launch: rank 0 of each machine writes", "machinery/run", "self._on_rank0(self._open)", 'self._open() if os.environ.get("LOCAL_RANK", "0") == "0" else None',
       "test_pitfall_32_one_rank_of_all_machines_saves")
mutant("log: --eval-only cuts it", "machinery/run", "if not self.eval_only:\n            first", "if True:\n            first", "test_eval_only_does_not_touch_the_log_of_a_run")
mutant("log: an epoch's last step is not logged", "machinery/run", "return ends or (self.state", "return (self.state",
       SPEED)
mutant("nodes: ranks are not compared", "machinery/run", 'check_agreement(must_agree | self.data, device)', "",
       "test_ranks_that_mean_different_runs_are_told[seed]")
mutant("order: every epoch is told that it is the first", "machinery/run", "set_position(self.state.epoch, self.state.step)", "set_position(0, self.state.step)",
       "test_pitfall_07_every_epoch_has_its_own_order")

# common.py

mutant("resume: nothing of the optimizer", "common", 'self.optimizer.load_state_dict(state | {"state": saved})', "numbers = []",
       f"{BITWISE}[single-1-9]")
mutant("resume: scheduler not restored", "common", 'self.scheduler.load_state_dict(checkpoint["scheduler"])', "pass",
       f"{BITWISE}[single-1-9]")
mutant("resume: scaler not restored", "common", 'self.scaler.load_state_dict(checkpoint["scaler"])', "pass",
       "test_loss_scale_of_fp16_goes_on_at_resume")
mutant("resume: average not restored", "common", "self.average.load_state_dict(", "dict(", f"{BITWISE}[single-1-9]")
mutant("resume: learning rate of the shorter run", "common", 'group["lr"] = peak * factor(self.global_step)', "pass",
       "test_more_epochs_follow_the_longer_schedule_from_the_first_step")
mutant("resume: fused of the other device", "common", "group[name] = now[name]", "pass", "test_restored_optimizer_has_the_strides_of_the_parameters[False-sgd]")
mutant("best: forgotten at resume", "common", 'for name in ("epoch", "step", "global_step", "best"):\n            setattr',
       'for name in ("epoch", "step", "global_step"):\n            setattr', "test_tie_is_kept_across_a_resume")
mutant("shards: not put together in a file", "common", "value.full_tensor().clone()", "value.to_local().clone()", "test_file_of_shards_holds_whole_plain_tensors")
mutant("shards: optimizer state is not cut", "common", "saved[i] = cut_like(saved[i], dict.fromkeys(saved[i], parameters[i]))", "pass",
       "test_run_that_changes_its_mode_at_each_stop_is_the_same_run")

# machinery/run.py

mutant("log: skipped steps counted twice", "machinery/run", "state.scaler.skipped.zero_()", "", f"{NAN}[ddp-2]")
mutant("log: loss of the whole run", "machinery/run", "self.meter.clear()", "", SPEED)
mutant("log: epochs from 1", "machinery/run", '"epoch": state.epoch,', '"epoch": state.epoch + 1,', SPEED)
mutant("log: learning rate of the next step", "machinery/run", '"lr": self.lr,', '"lr": state.optimizer.param_groups[0]["lr"],',
       "test_learning_rate_in_the_log_is_the_function_of_the_step")
mutant("speed: since the start of the epoch", "machinery/run", "self.began, self.waited, self.samples_before = now, 0.0, 0", "self.waited, self.samples_before = 0.0, 0",
       SPEED)
mutant("speed: with the evaluation", "machinery/run", "asked = self.began = time.perf_counter()", "asked = self.began = self.began or time.perf_counter()", SPEED)
mutant("speed: of one rank", "machinery/run", '(means["count"] - self', "(self.meter.count - self", "test_speed_is_that_of_all_ranks")
mutant("eval-only: the epoch after", "machinery/run", "epoch -= 1", "pass",
       "test_eval_only_names_the_epoch_whose_weights_it_sees")
mutant("print: epochs from 0", "machinery/run", "f\"epoch {line['epoch'] + 1}/", "f\"epoch {line['epoch']}/", "test_printed_line_is_what_was_logged")
mutant("seconds: counted twice", "machinery/run", "self.mark = now", "", "test_evaluation_line_has_the_seconds_of_training_evaluation_and_saving")

# machinery/run.py

mutant("save: classes without names", "machinery/run", "[str(name) for name in classes] if listed", "[] if listed", "test_checkpoint_of_other_data_or_another_model_is_refused[classes]")
mutant("save: NaN is written", "machinery/run", "if bad:", "if False:", "test_what_became_non_finite_is_never_saved_and_the_run_does_not_end_well[single-1]")
mutant("save: NaN in the average is written", "machinery/run", 'parts = checkpoint["model"], checkpoint["average"]', 'parts = (checkpoint["model"],)',
       "test_non_finite_average_never_reaches_a_file")
mutant("save: what cannot be loaded is saved", "machinery/run", "if not self.was_read_back:", "if False:",
       "test_what_no_run_could_load_ends_the_run_at_the_first_save[option]")
mutant("save: the log stays in memory", "machinery/run", "os.fsync(self.log.fileno())", "", DURABLE)
mutant("log: not cut back", "machinery/run", "self.log.truncate(self._bytes_before(checkpoint))", "pass",
       "test_log_stays_whole_lines_after_a_resume[torn]")
mutant("log: evaluation after the checkpoint kept", "machinery/run", 'entry["epoch"] < checkpoint["epoch"]', 'entry["epoch"] <= checkpoint["epoch"]',
       "test_killed_within_a_save[14]")
mutant("log: a torn last line is kept", "machinery/run", 'if not done or not line.endswith(b"\\n"):', "if not done:", "test_log_stays_whole_lines_after_a_resume")
mutant("log: infinity is written", "machinery/run", "isinstance(v, float) and not math.isfinite(v)", "isinstance(v, float) and math.isnan(v)",
       "test_the_first_of_equal_scores_stays_the_best")
mutant("lock: none", "machinery/run", "fcntl.flock(self.log, fcntl.LOCK_EX | fcntl.LOCK_NB)", "pass", "test_early_end_of_all_ranks_has_its_exit_code")
mutant("resume: changed options not noticed", "machinery/run", "self._check_config(checkpoint, path)", "pass", f"{CHANGED}[--seed 1]")
mutant("resume: other data are not noticed", "machinery/run", 'then, now = checkpoint["data"].get(name), self.data[name]', "then = now = None",
       "test_checkpoint_of_other_data_or_another_model_is_refused[samples]")
mutant("resume: a set that an option names is other data", "machinery/run", '["classes"] if changed else', "", "test_evaluation_of_other_data_is_refused_unless_an_option_names_them")
mutant("resume: from an older checkpoint leaves the newer last.pt", "machinery/run", "path.resolve() != (self.directory / name).resolve()", "name != 'last.pt'",
       "test_going_back_to_an_older_checkpoint_is_going_back")
mutant("resume: auto overwrites a run of which only the best is left", "machinery/run", "elif others:", "elif False:",
       "test_resume_auto_does_not_replace_a_run_of_which_only_the_best_is_left")
mutant("resume: any best.pt will do", "machinery/run", 'if (found["best"], found["epoch"], found["step"]) == (best, best[1], 0):', 'if found["best"] is not None:',
       "test_resume_of_an_earlier_checkpoint_does_not_take_a_later_best")
mutant("eval-only: writes into the log of a run", "machinery/run", 'self.only_reads = eval_only and any(directory.glob("*.pt"))', "self.only_reads = False",
       "test_eval_only_does_not_touch_the_log_of_a_run")

# machinery/process.py: devices, signals, exit codes

mutant("devices: the first one for all", "common", "torch.accelerator.set_device_index(index)", "torch.accelerator.set_device_index(0)",
       "test_pitfall_17_device_is_chosen_before_anything_else")
mutant("devices: --deterministic ignored", "common", "torch.use_deterministic_algorithms(deterministic)", "torch.use_deterministic_algorithms(False)",
       "test_deterministic_convolutions_do_not_use_tf32")
mutant("stop: SIGTERM ends with 0", "machinery/process", "signal.SIGTERM: 143", "signal.SIGTERM: 0", f"{BITWISE}[single-1-9]")
mutant("stop: SIGINT ends with 143", "machinery/process", "signal.SIGINT: 130", "signal.SIGINT: 143", "test_what_cannot_be_printed_ends_no_run[gone]")
mutant("launch: bad arguments end with 1", "machinery/process", "return 2", "return 1", "test_bad_command_line_ends_with_code_2_and_one_line")
mutant("launch: a stop ends with 0", "machinery/process", "code, reason = stop.code, stop.reason", "code, reason = 0, stop.reason", f"{BITWISE}[single-1-9]")
mutant("launch: leaves while others still talk to it", "machinery/process", "dist.barrier()", "pass", "test_early_end_of_all_ranks_has_its_exit_code")
mutant("launch: sys.exit(0) ends a device's run with 0", "machinery/process", "except (Exception, SystemExit) as error:", "except Exception as error:",
       "test_task_that_leaves_by_sys_exit_is_no_success[single-1]")
mutant("ends: a rank leaves before the others know", "machinery/process", 'return Stopped(2, f"error: {message}") if dist.is_initialized() else UsageError(message)',
       "return UsageError(message)", "test_early_end_of_all_ranks_has_its_exit_code")
mutant("end: a rank that fails ends well", "machinery/process", "leave(FAILED if launched else 1)", "leave(0)", "test_pitfall_06_dead_rank_ends_the_job[raises]")
mutant("print: what cannot be printed ends the run", "machinery/process", "with contextlib.suppress(OSError, ValueError):\n            self.stream.flush()", "self.stream.flush()",
       "test_what_cannot_be_printed_ends_no_run[gone]")
mutant("signals: nohup is not respected", "machinery/process", "if signal.getsignal(number) != signal.SIG_IGN:", "if True:", "test_signal_that_nohup_ignores_stays_ignored")
mutant("stop: the others wait as long as --timeout for a save", "machinery/run", "broadcast_object(problem, self.patient)", "broadcast_object(problem)",
       "test_ranks_wait_for_a_save_longer_than_for_each_other")
mutant("signals: Ctrl-C is stronger than the system", "machinery/process", "PRIORITY = [*SIGNALS]", "PRIORITY = [signal.SIGUSR1, signal.SIGHUP, signal.SIGTERM, signal.SIGINT]",
       "test_stronger_signal_wins_on_whichever_rank")
mutant("traces: handlers stay", "machinery/process", "signal.signal(number, handler or signal.SIG_DFL)", "pass", TRACES)
mutant("traces: variables stay", "machinery/process", "os.environ.update(environment)", "pass", TRACES)

# machinery/launch.py and machinery/process.py

mutant("launch: a failed rank is success", "machinery/launch", "if not any(ended):", "if 0 in ended:", BLAME)
mutant("launch: ranks that hang are waited for", "machinery/launch", "process.kill()", "", "test_rank_that_hangs_while_the_others_end_is_killed[143]")
mutant("launch: 1 for the ranks' own code", "machinery/launch", 'return chosen[0], ""', 'return 1, ""', BLAME)
mutant("launch: divergence is no end on purpose", "machinery/launch", "{2, 3, *SIGNALS.values()}", "{2, *SIGNALS.values()}", BLAME)
mutant("launch: ranks wait for one that has refused its input", "machinery/launch", "or 2 in ended:", ":", "test_refused_input_ends_the_other_ranks_at_once")
mutant("launch: signals not handed on", "machinery/launch", "os.kill(process.pid, number)", "pass", "test_rank_that_hangs_while_the_others_end_is_killed[143]")
mutant("launch: a fixed place to meet", "machinery/launch", 'yield f"file://{directory}/ranks"', 'yield "tcp://127.0.0.1:29500"',
       "test_pitfall_15_two_jobs_on_one_machine")
mutant("ranks: options are lost", "machinery/launch", "str(ROOT / script), *argv]", "str(ROOT / script)]", "test_run_that_goes_on_after_a_failure_is_the_same_to_the_bit")
mutant("launch: --timeout in minutes", "machinery/process", "timedelta(seconds=seconds)", "timedelta(minutes=seconds)",
       "test_timeout_reaches_the_process_group[ddp]")
mutant("slurm: local rank for the rank", "machinery/process", 'RANK=get("SLURM_PROCID")', 'RANK=get("SLURM_LOCALID")', "test_pitfall_40_ranks_from_slurm")
mutant("slurm: nodes meet on the last one", "machinery/process", '.split(",")[0]', '.split(",")[-1]', "test_pitfall_40_ranks_from_slurm")

# machinery/usertask.py

mutant("check: training samples are not looked at", "machinery/usertask", 'check_samples(task, net, device, train.dataset, micro_batch, meter, "training")', "pass",
       f"{REFUSED}[single-1 --task TMP/data-ragged.py]")
mutant("check: the model is always in training mode", "machinery/usertask", "net.eval()\n    _, (micro_batch", "_, (micro_batch", "test_check_changes_no_bit_of_the_run[single-1]")
mutant("check: a mean is a loss", "machinery/usertask", "common.Meter(device).add(loss=losses)", "", f"{REFUSED}[single-1 --task TMP/loss-mean.py]")
mutant("check: names of metrics are not compared", "machinery/usertask", 'val.dataset, batch, meter, "evaluation")', 'val.dataset, batch, common.Meter(device), "evaluation")',
       "test_task_that_cannot_be_right_is_refused_before_the_run[last_lacks]")
mutant("check: samples are fetched once", "machinery/usertask", "if digest(keyed, indices[:2]) != digest(keyed, indices[:2]):", "if False:",
       "test_data_set_with_a_generator_of_its_own_is_refused")
mutant("check: an optimizer that leaves a parameter out", "machinery/usertask", "if not trained <= parts <= {", "if not parts <= {",
       "test_optimizer_that_cannot_be_right_is_refused")
mutant("check: set_epoch is not called and nobody says so", "machinery/usertask", 'if hasattr(train_set, "set_epoch"):', "if False:",
       f"{REFUSED}[single-1 --task TMP/data-told.py]")
mutant("best: an unknown metric", "machinery/usertask", 'if args.best and args.best.removesuffix(":min") not in meter.names and not task.dataset_metrics:', "if False:",
       "test_metric_that_the_task_does_not_have_is_refused")
mutant("nodes: evaluation sets are not compared", "machinery/run", "digest(unseeded, [i]) for i in range(0, n, math.ceil(n / 8))", "str(i) for i in range(8)",
       "test_ranks_that_mean_different_runs_are_told[order]")
mutant("data: drawn without a seed", "machinery/usertask", "seed_generators(splitmix64(self.args.seed, -4))", "", "test_data_that_a_task_draws_are_the_same_on_every_rank")
mutant("model: initial weights without the seed", "machinery/usertask", "torch.manual_seed(args.seed)", "", "test_seed_decides_the_initial_weights")
mutant("weights: ignored in a run", "machinery/usertask", 'load_weights(net, content, option, complete=args.eval_only)', "pass",
       "test_weights_are_where_training_starts_in_every_mode[single-1]")
mutant("check: a metric named count", "machinery/usertask", 'RESERVED = {"loss", "count", "event", "epoch",', 'RESERVED = {"loss", "event", "epoch",',
       f"{REFUSED}[single-1 --task TMP/metrics-empty.py]")
mutant("check: --no-check is ignored", "machinery/usertask", "if not args.check:", "if False:", "test_check_can_be_left_out")

# machinery/modes.py

mutant("replicas: buffers shared", "machinery/modes", "name: b.clone() for", "name: b for", "test_data_parallel_is_ddp_with_batchnorm")
mutant("replicas: the last one updates the buffers", "machinery/modes", "enumerate([buffers, *copies])", "enumerate([*copies, buffers])",
       "test_data_parallel_is_ddp_with_batchnorm")
mutant("replicas: all drop the same units", "machinery/modes", "seed_generators(seed + r)", "seed_generators(seed)", f"{MASKS}[dp-2]")
mutant("replicas: first outputs twice", "machinery/modes", "for output in outputs])", "for output in [outputs[0], *outputs[:-1]]])", f"{EQUAL}[dp-2-1]")
mutant("sync-bn: statistics of the rank alone", "machinery/modes", "everything, first = gather_samples(value)", "everything, first = value, 0", f"{SYNC_BN}[3]")
mutant("sync-bn: nothing gathered without gradients", "machinery/modes", "with torch.enable_grad():", "with torch.set_grad_enabled(torch.is_grad_enabled()):",
       f"{SYNC_BN}[3]")
mutant("fsdp: rows of another size", "machinery/modes", "shape = (world_size // shard_size, shard_size)", "shape = (shard_size, world_size // shard_size)",
       "test_each_rank_holds_its_share")
mutant("fsdp: a wrapper is one part", "machinery/usertask", "if too_large or isinstance(part, LISTS)", "if isinstance(part, LISTS)",
       "test_parts_that_are_sharded_each_for_itself")
mutant("fsdp: a shared weight is cut", "machinery/usertask", "any(uses[id(p)] > 1 for p in own)", "False", "test_parts_that_are_sharded_each_for_itself")
mutant("fsdp: a rank is missing in the last forward", "machinery/modes", ".missing):", ".missing * 0):", f"{SHARDED}[-3]")

# machinery/cli.py

mutant("resume: another seed counts as harmless", "machinery/cli", '2**63 - 1), "N", 0, FIXED', '2**63 - 1), "N", 0, MAY_CHANGE', f"{CHANGED}[--seed 1]")
mutant("resume: --amp is harmless", "machinery/cli", '"--amp", ["off", "bf16", "fp16"], None, "off", FIXED,',
       '"--amp", ["off", "bf16", "fp16"], None, "off", MAY_CHANGE,', "test_what_may_change_at_resume_and_what_may_differ_between_nodes")
mutant("balanced: not resumed as such", "machinery/cli", 'flag("--balanced", FIXED,', 'flag("--balanced", MAY_CHANGE,', f"{CHANGED}[--balanced]")
mutant("eval-only: in another precision", "machinery/cli", '"--dtype", ["float32", "float64"], None, "float32", EVALUATED,',
       '"--dtype", ["float32", "float64"], None, "float32", FIXED,', "test_what_may_change_at_resume_and_what_may_differ_between_nodes")
mutant("options: batch size not compared with devices", "machinery/cli", "if args.batch_size < least:", "if False:", f"{REFUSED}[ddp-65 ]")
mutant("options: accumulation not counted", "machinery/cli", "least = world_size * args.accum_steps", "least = world_size", f"{REFUSED}[single-1 --accum-steps 65]")
mutant("options: booleans cannot be turned off", "machinery/cli", "argparse.BooleanOptionalAction", '"store_true"',
       "test_booleans_can_be_turned_off_and_help_is_readable[single]")
mutant("options: abbreviations accepted", "machinery/cli", "description=start, allow_abbrev=False", "description=start, allow_abbrev=True",
       f"{REFUSED}[single-1 --batch 32]")
mutant("options: infinity is a number", "machinery/cli", "or not math.isfinite(value)", "", f"{REFUSED}[single-1 --lr inf]")
mutant("options: a run is overwritten", "machinery/cli", "if not own and (saved or logged)", "if not own and logged",
       f"{REFUSED}[single-1 --output-dir TMP/run]")
mutant("options: the log of a run is overwritten", "machinery/cli", "if not own and (saved or logged)", "if not own and saved",
       f"{REFUSED}[single-1 --output-dir TMP/logged]")
mutant("options: more processes than accelerators", "machinery/cli", "here > available and", "False and", "test_more_processes_than_accelerators_is_refused")
mutant("options: sync-bn in data parallel", "machinery/cli", 'if mode == "dp" and args.sync_bn:', "if False:", f"{REFUSED}[dp-2 --sync-bn]")
mutant("default: --lr", "machinery/cli", '"--lr", amount, "X", 0.1,', '"--lr", amount, "X", 0.01,', "test_defaults")
mutant("fsdp: shards of unequal rows", "machinery/cli", "if world_size % size != 0:", "if False:", "test_ranks_of_one_row_share_a_copy")
