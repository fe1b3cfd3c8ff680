"""Mutants of common.py."""

from mutants_base import (
    BITWISE,
    BY_DESIGN,
    DAMAGED,
    DIVERGED,
    DURABLE,
    EQUAL,
    ORDERED,
    REFUSED,
    SCALE_LR,
    SKIP,
    mutant,
)

# One fault takes two or three lines here, and not seven.
# fmt: off

# -------------------------------------------------------------------------------------------------------------------------------- common.py

mutant("split_batch: strided micro-batches", "common", "t.tensor_split(pieces)[i]", "t[i::pieces]",
       "test_split_batch_cuts_nested_targets_along_the_first_dimension[2]")
REDUCE = "test_reduce_value_sums_or_averages_over_the_ranks_out_of_place[2]"
mutant("reduce_value: a sum for a mean", "common", "value = value / dist.get_world_size() if average else value", "pass", REDUCE)
mutant("reduce_value: in place", "common", "value = value.detach().clone()", "value = value.detach()", REDUCE)
METER = "test_meter_is_the_exact_mean_over_uneven_and_empty_shards"
mutant("meter: local means, not reduced", "common", "reduce_value(sums, average=False).tolist()", "sums.tolist()", METER)
mutant("meter: ranks averaged", "common", "reduce_value(sums, average=False)", "reduce_value(sums)", METER)
mutant("meter: a mean of means", "common", "value.detach().sum(dtype=self.dtype)\n        self.count += len(first)",
       "value.detach().mean(dtype=self.dtype)\n        self.count += 1", METER)
mutant("meter: batches counted, not samples", "common", "self.count += len(first)", "self.count += 1", METER)
mutant("meter: a column is one number a sample", "common", "value.dim() != 1 or ", "", f"{REFUSED}[single-1 --task TMP/loss-column.py]")
mutant("meter: a mean is one number a sample", "common", " or value.shape != first.shape", "",
       "test_a_loss_that_is_not_one_number_a_sample_is_refused")
mutant("meter: sums in float32", "common", 'torch.float32 if device.type == "mps" else torch.float64', "torch.float32", f"{EQUAL}[ddp-2-1]")
mutant("meter: count lost at resume", "common", 'int(share.pop("count"))', 'share.pop("count") * 0',
       "test_meter_goes_on_from_its_sums")
mutant("sync_buffers: no broadcast", "common", "dist.broadcast(buffer, src=0)", "pass",
       "test_pitfall_18_batchnorm_buffers_are_equal_in_evaluation")
mutant("sync_buffers: weights not compared", "common", "zip(names, largest, smallest) if a != b", "[]",
       "test_pitfall_27_forward_past_the_wrapper_is_noticed")
mutant("first backward: buffers keep a trace", "common", "net.get_buffer(name).copy_(before)", "pass", "test_run_with_ranks_begins_as_one_without[passing]")
mutant("first backward: parameters keep a trace", "common", "    net.load_state_dict(state)\n    for name, before", "    for name, before",
       "test_run_with_ranks_begins_as_one_without")
mutant("first backward: gradients stay", "common", "    model.zero_grad(set_to_none=True)\n", "", f"{BITWISE}[ddp-2-9]")
mutant("compression: bf16 sent as fp16", "common", 'f"{method}_compress_hook"', '"fp16_compress_hook"',
       "test_compressed_gradients_differ_by_their_rounding[bf16]")
mutant("freeze: has no effect", "common", "parameters[name].requires_grad_(False)", "parameters[name].requires_grad_(True)",
       "test_training_is_not_trivial")
mutant("amp: never on", "common", 'enabled=amp != "off"', "enabled=False", "test_amp_computes_in_its_type[bf16]")
mutant("amp: bf16 for fp16", "common", 'torch.float16 if amp == "fp16" else torch.bfloat16', "torch.bfloat16",
       "test_amp_computes_in_its_type[fp16]")
mutant("optimizer: --weight-decay of AdamW ignored", "common", "(momentum, 0.999), weight_decay=decay",
       "(momentum, 0.999)", "test_optimizer_has_what_the_options_say")
mutant("optimizer: --weight-decay of SGD ignored", "common", '"weight_decay": decay, ', "",
       "test_optimizer_has_what_the_options_say")
mutant("optimizer: --nesterov ignored", "common", '"nesterov": nesterov, ', "", "test_optimizer_has_what_the_options_say")
mutant("optimizer: momentum not initialised", "common", "for parameter in parameters if momentum else ():", "for parameter in ():",
       "test_fused_sgd_whose_first_step_is_skipped_starts_from_zero_momentum")
mutant("learning rate: always scaled", "common", "[rule]", '["linear"]', f"{SCALE_LR}[ddp-none-1]")
mutant("learning rate: root of N not taken", "common", '"sqrt": math.sqrt(devices)', '"sqrt": devices', f"{SCALE_LR}[ddp-sqrt-2]")
mutant("warm-up: off by one", "common", "factor * (step + 1) / start", "factor * step / start",
       "test_warmup_rises_linearly_to_the_peak")
mutant("cosine: ends after the run", "common", "(step - start) / max(1, end - start)", "(step - start) / end",
       "test_cosine_falls_from_one_to_zero_after_the_warmup")
mutant("cosine: begins with the warm-up", "common", "(step - start) / max(", "step / max(",
       "test_cosine_falls_from_one_to_zero_after_the_warmup")
mutant("step: drops one step late", "common", "bisect.bisect_right(", "bisect.bisect_left(",
       "test_step_drops_at_the_given_epochs")
mutant("step: epochs in another order", "common", "sorted(epoch * steps_per_epoch for epoch in step_epochs)",
       "[epoch * steps_per_epoch for epoch in step_epochs]",
       "test_step_epochs_in_any_order")
mutant("cyclic: a saw-tooth", "common", "(1 - abs(2 * share_of_cycle(step, start, end, marks) - 1))", "share_of_cycle(step, start, end, marks)",
       "test_cyclic_is_a_triangle_between_gamma_and_one")
mutant("cyclic: one cycle only", "common", "((step - start) % cycle)", "(step - start)", "test_cyclic_is_a_triangle_between_gamma_and_one")
mutant("scaler: skipped steps not counted", "common", "self.skipped += self.bad", "pass",
       f"{SKIP}[nan-off]")
mutant("scaler: in a row is never reset", "common", "(self.in_a_row + self.bad) * self.bad", "self.in_a_row + self.bad", DIVERGED)
mutant("scaler: scale moves in float32", "common", 'enabled=amp == "fp16"', "enabled=True", f"{SKIP}[nan-off]")
mutant("scaler: scale of fp16 fixed", "common", 'enabled=amp == "fp16"', "enabled=False", f"{SKIP}[nan-fp16]")
mutant("scaler: skipped steps forgotten at resume", "common", 'self.skipped.fill_(state["skipped"])', "pass",
       "test_scaler_goes_on_where_it_was_saved")
mutant("scaler: steps in a row forgotten at resume", "common", 'self.in_a_row.fill_(state["in_a_row"])', "pass",
       "test_scaler_goes_on_where_it_was_saved")
mutant("clipping: limit ignored", "common", "if limit is not None:", "if False:",
       "test_clip_grad_norm_looks_at_the_whole_gradient[0.1]")
mutant("clipping: tensor by tensor", "common", "nn.utils.clip_grads_with_norm_(net.parameters(), limit, norm)",
       "[nn.utils.clip_grad_norm_(parameter, limit) for parameter in net.parameters()]",
       "test_clip_grad_norm_looks_at_the_whole_gradient[0.1]")
mutant("scaler: norm before unscaling", "common", "norm = nn.utils.get_total_norm(", "norm = self.grad_scaler.get_scale() * nn.utils.get_total_norm(",
       "test_scaler_keeps_the_norm_of_the_true_gradient[1024.0]")
mutant("scaler: only NaN is noticed", "common", "self.norm * 0 != 0", "self.norm.isnan()", f"{SKIP}[inf-off]")
mutant("optimizer: never fused", "common", '"foreach" if sharded and name == "sgd" else "fused"', '"foreach"', "test_pitfall_36_steps_do_not_wait")
mutant("optimizer: of shards, parameter by parameter", "common", "**{kernels: True}", "fused=not sharded",
       "test_kernels_of_shards")
FUSED = "test_guard_of_a_fused_step_reads_nothing_and_computes_little"
mutant("scaler: a fused step with a NaN is made", "common", "= None, self.bad", "= None, None", FUSED)
mutant("scaler: a fused step waits for the host", "common", 'if optimizer.defaults.get("fused"):', "if False:", FUSED)
mutant("scaler: the norm is taken twice", "common", "self.bad = (self.norm * 0 != 0).float()",
       "self.bad = (nn.utils.get_total_norm(p.grad for p in parameters if p.grad is not None) * 0 != 0).float()", FUSED)
mutant("ema: another decay", "common", "decay: float = 0.99", "decay: float = 0.9",
       "test_ema_and_swa_are_what_they_say")
mutant("ema: statistics not averaged", "common", "ids |= {id(norm.running_mean), id(norm.running_var)}", "pass",
       "test_ema_and_swa_are_what_they_say")
mutant("save: file not on the disk before the rename", "common",
       "os.fsync(file.fileno())", "pass", DURABLE)
mutant("save: name not on the disk", "common", "os.fsync(directory)", "pass", DURABLE)
mutant("save: written over the old file", "common", "os.replace(temporary, path)",
       "path.write_bytes(temporary.read_bytes())", DURABLE)
mutant("save: temporary file in another folder", "common", '[path.with_name(f".{path.name}.tmp") for',
       '[path.parent.parent / f".{path.name}.tmp" for', DURABLE)
mutant("save: half a file stays behind", "common", "temporary.unlink(missing_ok=True)", "pass",
       "test_full_disk_in_the_middle_of_a_save_leaves_the_old_file_and_no_other")
mutant("save: half a copy stays behind", "common", "for temporary in temporaries:", "for temporary in temporaries[:1]:",
       "test_copy_that_fails_leaves_all_names_as_they_were")
OWN_FILES = "test_names_of_one_save_are_files_of_their_own"
mutant("save: serialised for each name", "common", "if path is paths[0]:", "if True:", OWN_FILES)
mutant("save: all names are one file", "common", "shutil.copyfile(temporaries[0], temporary)", "os.link(temporaries[0], temporary)", OWN_FILES)
mutant("save: copies of the file before", "common", "shutil.copyfile(temporaries[0], temporary)", "shutil.copyfile(paths[0], temporary)",
       "test_kept_epochs_are_every_so_many")
mutant("load: runs code in the file", "common", "weights_only=True)", "weights_only=False)",
       "test_hostile_pickle_is_refused_and_does_not_run")
mutant("load: checksums not tested", "common", "damaged := file.testzip()", "damaged := None", f"{DAMAGED}[flipped]")
mutant("load: to the device that saved it", "common", 'map_location="cpu", ', "", "test_pitfall_17_device_is_chosen_before_anything_else")
mutant("load: format not looked at", "common", 'or checkpoint.get("format") != FORMAT', "",
       "test_checkpoint_of_another_format_is_refused")
SHARE = "of[get_rank()] for name, of in sums.items()"
mutant("resume: sums of all ranks restored on every rank", "common", SHARE, "sum(of) for name, of in sums.items()", f"{BITWISE}[ddp-2-9]")
mutant("resume: sums of the ranks put together", "common", 'if len(sums["count"]) != ranks:', "if True:",
       "test_sums_of_ranks_go_back_to_the_ranks")
mutant("swa: from the first epoch", "common", "self.n_averaged < due", "self.n_averaged < epoch + 1",
       "test_ema_and_swa_are_what_they_say")
mutant("launch: every rank prints", "common", "    if get_rank() == 0:\n        print(",
       "    if True:\n        print(",
       "test_signal_during_an_evaluation_finds_the_run_saved_and_stops_it_after_the_evaluation[ddp-2]")
mutant("scaler: a NaN stays in BatchNorm", "common", "torch.where(self.bad > 0, kept", "torch.where(self.bad > 2, kept",
       "test_skipped_step_leaves_no_trace_in_batchnorm")
mutant("scaler: BatchNorm goes back to before the resume", "common", "torch.cat(buffers, out=kept)  # of the", "pass  #",
       "test_skipped_step_leaves_no_trace_in_batchnorm")
mutant("scaler: ten in a row are forgotten", "common", "self.in_a_row < MAX_SKIPPED_IN_A_ROW,", "self.in_a_row < 99,",
       "test_ten_skipped_steps_in_a_row_are_remembered")
mutant("weights: not loaded", "common", "    loaded.update(fits)\n", "",
       "test_weights_of_another_network_are_loaded_as_far_as_they_fit_and_the_rest_is_named")
mutant("weights: without the versions of modules", "common", "loaded = net.state_dict()", "loaded = dict(net.state_dict())",
       "test_file_is_loaded_by_a_network_that_asks_for_versions")
mutant("average: extra state stays at the start", "common", "self.module.get_submodule(name).set_extra_state(", "repr(",
       "test_average_has_the_extra_state_of_the_network")
mutant("ranks: int8 is unknown", "common", "integer = {1: torch.int8, 2:", "integer = {2:", "test_drift_of_a_parameter_of_one_byte_is_seen")
mutant("weights: prefixes kept", "common", 'if part not in ("module", "_orig_mod"))', ")",
       "test_weights_of_another_network_are_loaded_as_far_as_they_fit_and_the_rest_is_named")
mutant("weights: what is left out is not named", "common",
       "for name in [name for name in own if name not in fits]:", "for name in []:",
       "test_weights_of_another_network_are_loaded_as_far_as_they_fit_and_the_rest_is_named")
mutant("weights: none that fits is accepted", "common", "    if not fits:", "    if False:",
       "test_weights_that_do_not_fit_at_all_or_are_damaged_are_refused")
mutant("freeze: BatchNorm keeps learning", "common",
       "            norm.eval()  # it keeps its statistics\n", "            pass\n",
       "test_frozen_batchnorm_keeps_its_statistics[ddp-2]")
mutant("freeze: BatchNorm that is half frozen does not learn", "common", "if parameters and not any(parameter.requires_grad",
       "if parameters and not all(parameter.requires_grad", "test_frozen_batchnorm_keeps_its_statistics[single-1]")
mutant("swa: statistics of the last batches", "common", "        norm.momentum = None  # a mean over all batches\n", "",
       "test_swa_statistics_are_those_that_torch_estimates")
mutant("weights: what was trained, not the average", "common", 'average.get("n_averaged", 0) > 0', "False",
       "test_weights_of_a_checkpoint_are_its_average_once_there_is_one")
mutant("weights: an average that has not begun", "common", 'average.get("n_averaged", 0) > 0', "True",
       "test_weights_of_a_checkpoint_are_its_average_once_there_is_one")
mutant("weights: a prefix of the model's own names", "common", "names = {plain(name): name for name in own}", "names = {}",
       "test_prefix_that_is_a_name_of_the_model_stays")
mutant("scaler: a skipped batch is counted", "common", ', ("num_batches_tracked",)]', "]",
       "test_skipped_step_leaves_no_trace_in_batchnorm")
mutant("swa: a batch that is not finite counts", "common", "torch.where(finite, buffer, old)", "buffer",
       "test_batch_that_is_not_finite_is_left_out_of_swa_statistics[single-1]")
mutant("load: a file from before torch 1.6 is refused", "common", "if zipfile.is_zipfile(path):", "if True:",
       "test_weights_that_do_not_fit_at_all_or_are_damaged_are_refused")
mutant("weights: NaN accepted", "common", "    if bad:\n", "    if False:\n",
       "test_weights_that_do_not_fit_at_all_or_are_damaged_are_refused")
mutant("powersgd: buckets overtake one another", "common",
       "        future.wait()  # gloo would start the all-reduces of two buckets in any order\n", "            pass\n",
       "test_buckets_that_powersgd_sends_do_not_overtake_one_another")
mutant("by design: nothing is", "common", "    if before is None:\n        return True\n    before", "    return True\n    before",
       f"{BY_DESIGN}[none-single-1]", "test_became_non_finite_compares_place_by_place")
mutant("by design: the whole tensor", "common", "return not (value.isfinite() | (value == before) |", "return not (before.isfinite().logical_not().any() |",
       "test_became_non_finite_compares_place_by_place")
mutant("by design: NaN becomes infinite", "common", "| (value.isnan() & before.isnan())", "| before.isnan()",
       "test_became_non_finite_compares_place_by_place")
mutant("by design: a NaN is not", "common", " | (value.isnan() & before.isnan())", "",
       "test_became_non_finite_compares_place_by_place")
mutant("by design: a sum that overflows", "common", " or value.isfinite().all():", ":",
       "test_became_non_finite_compares_place_by_place")
mutant("by design: no weights with a mask", "common",
       "became_non_finite(value.to(own[n].dtype), own[n])",
       "became_non_finite(value.to(own[n].dtype), None)",
       "test_weights_with_values_by_design_are_loaded")
mutant("by design: judged in the precision of the file", "common",
       "became_non_finite(value.to(own[n].dtype), own[n])", "became_non_finite(value, own[n])",
       "test_weights_keep_their_precision")
mutant("ema: all buffers averaged", "common", "[id(value) in ids for value",
       "[value.is_floating_point() for value",
       "test_ema_averages_parameters_and_statistics_and_copies_the_rest")
mutant("ema: the variance is a copy", "common", "{id(norm.running_mean), id(norm.running_var)}", "{id(norm.running_mean)}",
       "test_ema_averages_parameters_and_statistics_and_copies_the_rest")
mutant("ema: statistics forget twice as slowly", "common", "share = 1 - self.decay if", "share = (1 - self.decay) / 2 if",
       "test_ema_averages_parameters_and_statistics_and_copies_the_rest")
mutant("ema: the first statistics count a hundredth", "common", 'self.kind == "ema" and n else',
       'self.kind == "ema" else', "test_ema_averages_parameters_and_statistics_and_copies_the_rest")
mutant("meter: a new name is welcome", "common",
       "        if self.sums:\n            self._check_names(values)", "        if False:\n            self._check_names(values)",
       "test_metric_of_some_batches_alone_ends_the_run[single-1]")
mutant("meter: names of other ranks are dropped", "common",
       "        if self.sums:\n            self._check_names([*names", "        if False:\n            self._check_names([*names",
       "test_names_that_one_rank_alone_has_are_an_error_and_an_empty_rank_is_none")

for name in ("error_dict", "p_memory_dict"):
    mutant(f"powersgd: {name} keeps a NaN", "common", f"state.{name}, state", "state", "test_power_sgd_forgets_a_nan")
mutant("powersgd: nothing is forgotten", "common", "if bucket.index() == 0 and scaler.in_a_row > 0:", "if False:", "test_power_sgd_forgets_a_nan")
mutant("cyclic: the warm-up passes the start", "common", "return factor * (step + 1) / start if",
       "return (step + 1) / start if", "test_cyclic_schedule_has_no_cliff")
mutant("cyclic: begins with the warm-up", "common", "((step - start) % cycle)", "(step % cycle)",
       "test_cyclic_schedule_has_no_cliff")
mutant("cyclic: one cycle ends after the run", "common",
       "marks[0] if marks else max(1, end - start)", "marks[0] if marks else end",
       "test_cyclic_schedule_has_no_cliff")
mutant("average: infinite parameters become NaN", "common", "for i in self.infinite:", "for i in ():",
       "test_average_of_parameters_that_are_infinite_by_design[ema]")
mutant("average: a parameter with an infinity is a copy", "common",
       "torch.where(values[i].isfinite(), averages[i], values[i])", "values[i]",
       "test_average_of_parameters_that_are_infinite_by_design[swa]")
mutant("save: only last.pt is durable", "common", "            os.fsync(file.fileno())  # the data",
       '            path.name != "last.pt" or os.fsync(file.fileno())  # the data', ORDERED)
NAME = "os.fsync(directory)  # and the name too"
mutant("save: only the name of last.pt is durable", "common", NAME, 'path.name != "last.pt" or os.fsync(directory)', ORDERED)
mutant("save: only the names of others are durable", "common", NAME, 'path.name == "last.pt" or os.fsync(directory)', ORDERED)
SYNC = """            with open(temporary, "rb") as file:
                os.fsync(file.fileno())  # the data must be on the disk before a name points to it
"""
APPEAR = """        for path, temporary in zip(paths, temporaries):
            os.replace(temporary, path)  # atomic within one file system
            directory = os.open(path.parent, os.O_RDONLY)
            os.fsync(directory)  # and the name too
            os.close(directory)
"""
mutant("save: on the disk when it has its name", "common", SYNC + APPEAR, f"            pass\n{APPEAR}" + SYNC.replace("temporary", "path"), ORDERED)
mutant("save: another folder is made durable", "common", "directory = os.open(path.parent, os.O_RDONLY)",
       'directory = os.open(".", os.O_RDONLY)', ORDERED)
mutant("save: a leftover is written on", "common", 'open(temporary, "wb")', 'open(temporary, "ab")',
       "test_leftover_of_a_killed_save_does_no_harm")
DRIFTED = "test_drift_of_any_parameter_on_any_rank_is_named"
SUMMED = "for p in net.parameters()]\n    sums"
mutant("drift: of the first parameter only", "common", SUMMED, "for p in list(net.parameters())[:1]]\n    sums", DRIFTED)
mutant("drift: of all but the last parameter", "common", SUMMED, "for p in list(net.parameters())[:-1]]\n    sums", DRIFTED)
mutant("drift: of what trains only", "common", SUMMED, "for p in net.parameters() if p.requires_grad]\n    sums", DRIFTED)
mutant("drift: of weights in float32", "common", "p.detach().view(integer[p.element_size()])", "p.detach().float().view(torch.int32)", DRIFTED)
mutant("drift: of sums, not of bits", "common", "[value.sum(dtype=torch.int64) for value in bits]",
       "[p.detach().double().sum().view(torch.int64) for p in net.parameters()]", DRIFTED)
mutant("drift: the last names", "common", "different[:5]", "different[-5:]", DRIFTED)
mutant("drift: whole numbers of rank 0 stay there", "common", "    for buffer in net.buffers():\n        dist.broadcast",
       "    for buffer in filter(torch.is_floating_point, net.buffers()):\n        dist.broadcast", DRIFTED)
mutant("drift: buffers of rank 1", "common", "dist.broadcast(buffer, src=0)", "dist.broadcast(buffer, src=1)", DRIFTED)
mutant("warm-up: cut down", "common",
       "round(warmup_epochs * steps_per_epoch)",
       "int(warmup_epochs * steps_per_epoch)",
       "test_warmup_is_rounded_to_the_nearest_step")
mutant("cosine: rises again after the end", "common",
       "min(1.0, (step - start) / max(1, end - start))",
       "(step - start) / max(1, end - start)",
       "test_cosine_stays_at_zero_after_its_end_and_a_run_may_be_all_warmup")
mutant("cosine: nothing but warm-up divides by zero", "common",
       "(step - start) / max(1, end - start)",
       "(step - start) / (end - start)",
       "test_cosine_stays_at_zero_after_its_end_and_a_run_may_be_all_warmup")
mutant("scaler: another first scale", "common",
       'enabled=amp == "fp16")',
       'enabled=amp == "fp16", init_scale=2.0**10)',
       "test_scaler_skips_and_counts_non_finite_gradients_at_every_precision", "test_scaler_keeps_the_norm_of_the_true_gradient")
mutant("powersgd: another rank", "common",
       '"matrix_approximation_rank": 4',
       '"matrix_approximation_rank": 1',
       "test_settings_of_powersgd")
mutant("powersgd: compresses from the first step", "common",
       '"start_powerSGD_iter": 10',
       '"start_powerSGD_iter": 2',
       "test_settings_of_powersgd")
mutant("freeze: all may be frozen", "common",
       "if frozen == len(parameters):",
       "if False:",
       "test_bad_input_is_refused_by_name")
mutant("freeze: says how many are left", "common",
       'print0(f"frozen: {frozen} of',
       'print0(f"frozen: {len(list(net.parameters())) - frozen} of',
       "test_build_says_how_many_tensors_are_frozen")
mutant("weights: number of the file's tensors", "common",
       'print0(f"weights: {len(fits)} of',
       'print0(f"weights: {len(given)} of',
       "test_weights_of_another_network_are_loaded_as_far_as_they_fit_and_the_rest_is_named")
mutant("weights: extra ones not named", "common",
       "if extra := [name for name in given if name not in own]:",
       "if extra := []:",
       "test_weights_of_another_network_are_loaded_as_far_as_they_fit_and_the_rest_is_named")
mutant("meter: sums of another world to rank 1", "common",
       "[sum(of)] + [0.0] * (ranks - 1)",
       "[0.0] * (ranks - 1) + [sum(of) * (ranks > 1)]",
       "test_sums_of_ranks_go_back_to_the_ranks", "test_meter_goes_on_from_its_sums")
mutant("drift: the smallest number has no negative", "common", "torch.cat([sums, ~sums])", "torch.cat([sums, 1 - sums])", DRIFTED)
mutant("drift: minus zero is overlooked", "common", "torch.cat([sums, ~sums])  # ~ and not -, which would overflow at the smallest number\n    dist.all_reduce(extremes, op=dist.ReduceOp.MAX)  # the largest, and in reverse order the smallest\n    largest, smallest = extremes[: len(sums)].tolist(), (~extremes[len(sums) :]).tolist()",
       "torch.cat([sums, -sums])\n    dist.all_reduce(extremes, op=dist.ReduceOp.MAX)\n    largest, smallest = extremes[: len(sums)].tolist(), (-extremes[len(sums) :]).tolist()", DRIFTED)
mutant("schedule: the final rate is forgotten", "common", "low = step_gamma if schedule in USE_MARKS else final_lr", "low = step_gamma if schedule in USE_MARKS else 0.0",
       "test_cosine_falls_to_the_final_rate")
mutant("schedule: --step-gamma for cosine", "common", "low = step_gamma if schedule in USE_MARKS else final_lr", "low = step_gamma",
       "test_cosine_falls_to_the_final_rate")
mutant("freeze: leaves nothing out", "common", 'chosen - matched if pattern.startswith("!") else', "", "test_freeze_all_but")
mutant("freeze: what is left out begins to train", "common", "parameters[name].requires_grad_(False)", "parameters[name].requires_grad_(False)\n    for name in parameters.keys() - chosen:\n        parameters[name].requires_grad_(True)",
       "test_freeze_does_not_wake_what_the_model_has_frozen")
mutant("weights: the average of other programs", "common", 'for part in ("ema", "weights",', 'for part in ("weights",',
       "test_weights_of_another_network_are_loaded_as_far_as_they_fit_and_the_rest_is_named")
mutant("weights: the pose trainer's key", "common", '("ema", "weights",', '("ema",',
       "test_weights_of_another_network_are_loaded_as_far_as_they_fit_and_the_rest_is_named")
mutant("weights: prefixes at the beginning alone", "common", 'return ".".join(part for part in name.split(".") if part not in ("module", "_orig_mod"))',
       'return __import__("re").sub(r"^((module|_orig_mod)\\.)+", "", name)', "test_prefix_within_a_name_is_taken_away")
mutant("lr: the first group alone is scaled", "common", "for group in optimizer.param_groups:\n        group[\"lr\"]", "for group in optimizer.param_groups[:1]:\n        group[\"lr\"]",
       "test_rates_of_all_groups_are_scaled")
mutant("lr: a tensor stays one", "common", 'float(group["lr"]) * factor', 'group["lr"] * factor', "test_rate_of_an_optimizer_may_be_a_tensor_or_of_numpy")
mutant("freeze: an exception without effect", "common", 'or (pattern.startswith("!") and not matched & chosen)', "", "test_pattern_without_effect_is_refused")
mutant("weights: a prefix wins over the exact name", "common", "    given |= {name: value for name, value in weights.items() if name in own}\n", "",
       "test_exact_names_come_before_names_without_a_prefix")
mutant("weights: the first part, whatever it holds", "common", "and any(isinstance(v, (Tensor, dict)) for v in inner.values())", "",
       "test_weights_are_found_where_the_tensors_are")
mutant("meter: lists of the ranks one after the other", "common", "return [value for batches in rounds for batch in batches for value in batch]",
       "return [value for lists in ranks for batch in lists.get(name, []) for value in batch]", "test_metrics_of_the_whole_set_are_bitwise_the_same_in_every_mode")
mutant("meter: lists of rank 0 alone", "common", "dist.gather_object(self.lists, ranks if get_rank() == 0 else None)", "pass", "test_metrics_of_the_whole_set_are_bitwise_the_same_in_every_mode")
mutant("meter: lists of the last evaluation stay", "common", "        self.lists: dict[str, list[list]] = {}\n        self.count = 0", "        self.lists = getattr(self, 'lists', {})\n        self.count = 0",
       "test_lists_are_forgotten_when_a_meter_is_cleared")
mutant("sawtooth: rises", "common", "return 1 - (1 - low) * share_of_cycle(step, start, end, marks)", "return low + (1 - low) * share_of_cycle(step, start, end, marks)",
       "test_sawtooth_falls_from_one_to_gamma_and_jumps_back")
SWA_EPOCHS = "test_epochs_that_swa_averages"
mutant("swa: begins where rounding says", "common", "math.floor(epochs * swa_start + 1e-9)", "math.floor(epochs * swa_start)", SWA_EPOCHS)
mutant("swa: always the last quarter", "common", "math.floor(epochs * swa_start + 1e-9)", "epochs * 3 // 4", SWA_EPOCHS)
mutant("swa: every epoch of a cycle", "common", "if schedule not in CYCLES:\n        return", "if True:\n        return", SWA_EPOCHS)
mutant("swa: the end of the warm-up is the end of a cycle", "common", "cycles > 0.5 and", "True and", SWA_EPOCHS)
mutant("swa: cycles from the first step", "common", "cycles = (epoch - warmup_epochs) / cycle", "cycles = epoch / cycle", SWA_EPOCHS)
mutant("swa: in the middle of a cycle", "common", "abs(cycles - round(cycles)) < 1e-9", "True", SWA_EPOCHS)
mutant("metrics: of the set and of samples under one name", "common", "if both := ", "if both := () and ", "test_metrics_of_the_whole_set_that_cannot_be_right")
mutant("metrics: views with all of their memory", "common", "v.detach().cpu().clone() if", "v.detach().cpu() if", "test_views_are_not_kept_with_all_of_their_memory")
mutant("swa: a saw-tooth has no cycle", "common", 'CYCLES = ["cyclic", "sawtooth"]', 'CYCLES = ["cyclic"]', SWA_EPOCHS)

# What accelerators would meet
mutant("average: a complex parameter is a copy", "common", " or p.is_complex()}", "}", "test_average_is_torchs_own")
mutant("average: waits for the device", "common", "torch._foreach_lerp_(mine, new, share)", "super().update_parameters(net)",
       "test_average_copies_nothing_from_the_host")
mutant("swa: statistics averaged", "common", 'if kind == "ema" else ()', "", "test_average_is_torchs_own[swa]")
mutant("swa: each epoch counts as much as all before", "common", "else 1 / (n + 1)", "else 1 / min(n + 1, 2)", "test_average_is_torchs_own[swa]")
mutant("powersgd: waits for every backend", "common", 'if bucket.buffer().device.type == "cpu":', "if True:",
       "test_power_sgd_waits_for_gloo_alone")
mutant("powersgd: waits for no backend", "common", 'if bucket.buffer().device.type == "cpu":', "if False:",
       "test_power_sgd_waits_for_gloo_alone")
mutant("bf16 gradients: refused without CUDA", "common", "None, lambda state, bucket: compress(state, bucket)", "None, compress",
       "test_bf16_gradients_need_no_cuda")
