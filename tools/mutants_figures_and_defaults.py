"""Mutants: figures and defaults."""

from mutants_base import *
from mutants_options_and_processes import *

# One fault takes two or three lines here, and not seven.
# fmt: off

# ------------------------------------------- figures, the order of files, drift, photographs, half precision, two signals, bench

FIGURES, SAVES, DRIFT = "log_figures::test_", "save_order::test_", "drift::test_"
PHOTO, SUMS, TWO = "photographs::test_", "bench_sums::test_", "two_signals::test_"
SPEED = f"{FIGURES}speed_is_the_samples_since_the_last_line_over_the_seconds_since"
RANKS_SPEED = f"{FIGURES}speed_and_loss_are_those_of_all_ranks"
PRINTED = f"{FIGURES}printed_line_is_what_was_logged"
BAR = f"{FIGURES}progress_bar_shows_the_position_and_the_figures"
SCALARS = f"{FIGURES}tensorboard_gets_the_figures_of_the_log"
mutant("speed: in images a millisecond", "machinery/run", "(now - self.clock)", "((now - self.clock) * 1000)", SPEED)
mutant("speed: since the start of the epoch", "machinery/run", "        self.clock = now\n", "", SPEED)
mutant("speed: with the evaluation", "machinery/run", "self.clock, self.lr = time.perf_counter(),",
       'self.clock, self.lr = getattr(self, "clock", time.perf_counter()),', SPEED)
mutant("speed: of one rank", "machinery/run", 'means["count"] / (now', "self.meter.count / (now", RANKS_SPEED)
mutant("log: epochs from 1", "machinery/run", '"epoch": state.epoch,\n', '"epoch": state.epoch + 1,\n', SPEED)
mutant("log: step of the run for that of the epoch", "machinery/run", '"step": state.step,\n', '"step": state.global_step,\n', SPEED)
mutant("log: steps of an epoch are counted for --log-every", "machinery/run", "if ends or state.global_step % args.log_every == 0:",
       "if ends or state.step % args.log_every == 0:", SPEED)
mutant("log: an epoch's last step is not logged", "machinery/run", "if ends or state.global_step % args.log_every == 0:",
       "if state.global_step % args.log_every == 0:", SPEED)
mutant("log: learning rate of the next step", "machinery/run", '"lr": self.lr,', '"lr": state.optimizer.param_groups[0]["lr"],',
       f"{FIGURES}learning_rate_and_norm_of_a_line_are_those_of_its_step")
mutant("log: norm rounded to float32", "machinery/run", '"grad_norm": grad_norm.item()', '"grad_norm": grad_norm.float().item()',
       f"{FIGURES}learning_rate_and_norm_of_a_line_are_those_of_its_step")
mutant("log: infinity is written", "machinery/files", "isinstance(value, float) and not math.isfinite(value)",
       "isinstance(value, float) and math.isnan(value)", f"{FIGURES}what_json_cannot_say_is_null")
mutant("print: epochs from 0", "machinery/run", "f\"epoch {line['epoch'] + 1}/", "f\"epoch {line['epoch']}/", PRINTED)
mutant("print: step of the run for that of the epoch", "machinery/run", "step {state.step}/{self.steps_per_epoch}  ",
       "step {state.global_step}/{self.steps_per_epoch}  ", PRINTED)
mutant("print: samples for images/s", "machinery/run", "{line['images_per_s']:.0f} images/s", "{means['count']:.0f} images/s", PRINTED)
mutant("print: skipped in a row for skipped", "machinery/run", "skipped {skipped} steps", "skipped {state.scaler.in_a_row:.0f} steps", PRINTED)
mutant("print: four digits of the loss", "machinery/run", "loss {line['loss']:.6f}", "loss {line['loss']:.4f}", PRINTED)
mutant("print: evaluation with the count twice", "machinery/run", 'for name, value in metrics.items() if name != "count"]',
       "for name, value in metrics.items()]", f"{FIGURES}evaluation_is_printed_and_logged")
mutant("print: a resumed run names the epoch before", "machinery/run", 'f"at epoch {state.epoch + 1}, step', 'f"at epoch {state.epoch}, step',
       f"{FIGURES}resumed_run_says_where_it_goes_on")
mutant("print: a finished run goes on", "machinery/run", "if state.epoch >= epochs:", "if state.epoch > epochs:",
       f"{FIGURES}resumed_run_says_where_it_goes_on")
mutant("bar: starts at 0 after a resume", "machinery/run", "initial=self.state.step, ", "", BAR)
mutant("bar: names the epoch before", "machinery/run", 'f"epoch {self.state.epoch + 1}/{self.args.epochs}"',
       'f"epoch {self.state.epoch}/{self.args.epochs}"', BAR)
mutant("bar: does not move", "machinery/run", "            self.bar.update()\n", "            self.bar.update(0)\n", BAR)
mutant("bar: stays open", "machinery/run", "        self.bar.close()\n", "        pass\n", BAR)
mutant("bar: position twice", "machinery/run", 'text.partition("  ")[2]',
       "text", BAR)
mutant("tensorboard: counts are curves", "machinery/files", '"step", "global_step", "count"}', '"step", "global_step"}', SCALARS)
mutant("tensorboard: over the epoch", "machinery/files", "line[name], line[\"global_step\"])", 'line[name], line["epoch"])', SCALARS)
for mode in ("single", "dp", "ddp", "spawn"):
    mutant(f"{mode}: norm after clipping is logged", f"train_{mode}", "run.end_step(state.scaler.norm)",
           "run.end_step(state.scaler.norm.clamp(max=args.clip_grad_norm))",
           f"{FIGURES}every_mode_logs_the_norm_of_the_whole_gradient_before_clipping")
    mutant(f"{mode}: evaluated before it is saved", f"train_{mode}",
           'run.save("last.pt")', "pass",
           f"{SAVES}training_is_saved_before_its_evaluation_and_the_epoch_after_it[{mode}-{1 if mode == 'single' else 2}]")

ORDERED = f"{SAVES}files_of_an_epoch_appear_whole_durable_and_in_this_order"
LOGGED = f"{SAVES}log_is_on_the_disk_before_a_checkpoint_is_begun"
TIES = f"{SAVES}the_first_of_equal_scores_stays_the_best"
ALL = 'self.save(*names, "last.pt")'
FSYNC = "        os.fsync(self.log.fileno())  # a checkpoint must not be ahead of the log\n"
WRITE = "        for name in names:\n            save_checkpoint(checkpoint, self.directory / name)\n"
NAME = "os.fsync(directory)  # and the name too"
mutant("save: last.pt before best.pt", "machinery/run", ALL, 'self.save("last.pt", *names)', ORDERED)
mutant("save: last.pt before the kept one", "machinery/run", ALL, 'self.save(*names[:1], "last.pt", *names[1:])', ORDERED)
mutant("save: in the opposite order", "machinery/files", "        for name in names:\n", "        for name in names[::-1]:\n", ORDERED)
mutant("save: the log stays in memory", "machinery/files", FSYNC, "", LOGGED)
mutant("save: the log after the checkpoint", "machinery/files", FSYNC + WRITE, WRITE + FSYNC, LOGGED)
mutant("log: lines stay in Python's memory", "machinery/files", "        self.log.flush()\n", "", LOGGED)
mutant("save: only last.pt is durable", "common", "            os.fsync(file.fileno())  # the data",
       '            path.name != "last.pt" or os.fsync(file.fileno())  # the data', ORDERED)
mutant("save: only the name of last.pt is durable", "common", NAME, 'path.name != "last.pt" or os.fsync(directory)', ORDERED)
mutant("save: only the names of others are durable", "common", NAME, 'path.name == "last.pt" or os.fsync(directory)', ORDERED)
mutant("save: on the disk before it is written", "common", "            torch.save(checkpoint, file)\n            file.flush()\n"
       "            os.fsync(file.fileno())  # the data must be on the disk before the name points to it\n",
       "            os.fsync(file.fileno())\n            torch.save(checkpoint, file)\n            file.flush()\n", ORDERED)
mutant("save: another folder is made durable", "common", "directory = os.open(path.parent, os.O_RDONLY)",
       'directory = os.open(".", os.O_RDONLY)', ORDERED)
mutant("save: a leftover is written on", "common", 'open(temporary, "wb")', 'open(temporary, "ab")',
       f"{SAVES}leftover_of_a_killed_save_does_no_harm")
mutant("save: --keep-every one epoch late", "machinery/run", "state.epoch % args.keep_every == 0", "state.epoch % args.keep_every == 1",
       f"{SAVES}kept_epochs_are_every_so_many")
mutant("save: kept under the number of the epoch before", "machinery/run", 'f"epoch-{state.epoch:04}.pt"', 'f"epoch-{state.epoch - 1:04}.pt"',
       f"{SAVES}kept_epochs_are_every_so_many")
mutant("best: the last of equal scores", "machinery/run", "or score > state.best)\n", "or score >= state.best)\n", TIES)
mutant("best: infinity", "machinery/run", "math.isfinite(score) and (state", "not math.isnan(score) and (state", TIES)
mutant("best: zero is no score", "machinery/run", "(state.best is None or score", "(not state.best or score", TIES)
mutant("best: by the metric before the loss", "machinery/run", 'for name, value in metrics.items() if name != "loss")\n        self.log',
       "for name, value in metrics.items())\n        self.log", f"{SAVES}first_metric_that_is_no_loss_decides")
mutant("best: forgotten at resume", "machinery/run", 'for name in ("epoch", "step", "global_step", "best"):\n            setattr',
       'for name in ("epoch", "step", "global_step"):\n            setattr', f"{SAVES}tie_is_kept_across_a_resume")
EVAL_ONLY = f"{SAVES}eval_only_names_the_epoch_whose_weights_it_sees"
mutant("eval-only: the epoch after", "machinery/run", "epoch -= 1  # the checkpoint counts the epoch as done", "pass", EVAL_ONLY)
mutant("eval-only: the epoch before the first", "machinery/run", "self.state.step == 0 < epoch", "self.state.step == 0", EVAL_ONLY)
mutant("eval-only: the epoch before that of a step", "machinery/run", "self.state.step == 0 < epoch", "0 < epoch", EVAL_ONLY)

DRIFTED = f"{DRIFT}drift_of_any_parameter_on_any_rank_is_named"
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

MIDDLE = f"{PHOTO}evaluation_resizes_the_shorter_side_and_takes_the_middle"
RECIPE, SMALL = f"{PHOTO}crop_is_made_as_torchvision_makes_it", f"{PHOTO}small_images_fill_the_frame"
SHIFTED, KEYED_CROP = f"{PHOTO}small_images_are_shifted_by_an_eighth_and_half_of_them_mirrored", f"{PHOTO}crop_is_keyed_by_the_sample_the_epoch_and_the_seed"
SMALL_KEYED, FOLDERS = f"{PHOTO}small_image_files_are_keyed_by_the_sample", f"{PHOTO}folders_are_classes_and_val_goes_before_test"
CONSTANTS, NORMALISED = f"{PHOTO}constants_of_every_data_set", f"{PHOTO}network_sees_each_channel_normalised_in_its_precision"
DRAWS, ARRAYS = f"{PHOTO}draws_decide_the_window_and_the_mirroring", f"{PHOTO}arrays_are_augmented_in_training_only"
EVAL_SIZE = "v2.Resize(size * 8 // 7, antialias=True)"
mutant("photograph: resized to the crop", "task", EVAL_SIZE, "v2.Resize(size, antialias=True)", MIDDLE)
mutant("photograph: resized to the next number", "task", EVAL_SIZE, "v2.Resize(round(size * 8 / 7), antialias=True)", MIDDLE)
mutant("photograph: another margin", "task", EVAL_SIZE, "v2.Resize(size * 7 // 6, antialias=True)", MIDDLE)
mutant("photograph: squeezed", "task", EVAL_SIZE, "v2.Resize((size * 8 // 7, size * 8 // 7), antialias=True)", MIDDLE)
mutant("photograph: resized without antialiasing", "task", EVAL_SIZE, "v2.Resize(size * 8 // 7, antialias=False)", MIDDLE)
mutant("photograph: resized by the nearest pixel", "task", EVAL_SIZE, "v2.Resize(size * 8 // 7, interpolation=0)", MIDDLE)
mutant("photograph: evaluated anywhere", "task", "v2.CenterCrop(size)", "v2.RandomCrop(size)", MIDDLE)
mutant("photograph: evaluated mirrored", "task", "v2.CenterCrop(size)]", "v2.CenterCrop(size), v2.RandomHorizontalFlip(1.0)]", MIDDLE)
mutant("photograph: evaluated whole", "task", ", v2.CenterCrop(size)]", ", v2.Resize((size, size), antialias=True)]", MIDDLE)
CROP = "v2.RandomResizedCrop(size, antialias=True)"
mutant("photograph: crops of half of it at least", "task", CROP, "v2.RandomResizedCrop(size, scale=(0.5, 1.0), antialias=True)",
       f"{PHOTO}training_crops_are_of_any_size_and_shape_within_the_recipe")
mutant("photograph: square crops", "task", CROP, "v2.RandomResizedCrop(size, ratio=(1.0, 1.0), antialias=True)",
       f"{PHOTO}training_crops_are_of_any_size_and_shape_within_the_recipe")
mutant("photograph: cropped without antialiasing", "task", CROP, "v2.RandomResizedCrop(size, antialias=False)", RECIPE)
mutant("photograph: never mirrored", "task", ", v2.RandomHorizontalFlip()]", "]", f"{PHOTO}half_of_the_crops_are_mirrored")
mutant("photograph: always mirrored", "task", "v2.RandomHorizontalFlip()]", "v2.RandomHorizontalFlip(1.0)]",
       f"{PHOTO}half_of_the_crops_are_mirrored")
mutant("photograph: upside down", "task", "v2.RandomHorizontalFlip()]", "v2.RandomVerticalFlip()]", RECIPE)
FIT = "splitmix64(self.seed, self.epoch, index))\n        return"
mutant("photograph: crop without the seed", "task", FIT, "splitmix64(0, self.epoch, index))\n        return", KEYED_CROP)
mutant("photograph: crop without the epoch", "task", FIT, "splitmix64(self.seed, 0, index))\n        return", KEYED_CROP)
mutant("photograph: crop without the sample", "task", FIT, "splitmix64(self.seed, self.epoch, 0))\n        return", KEYED_CROP)
mutant("photograph: crop by what was drawn before", "task", "torch.default_generator.manual_seed(splitmix64(self.seed", "(splitmix64(self.seed",
       KEYED_CROP)
mutant("photograph: 64 pixels are small", "task", "training, size < 64", "training, size <= 64", MIDDLE)
mutant("photograph: 63 pixels are not small", "task", "training, size < 64", "training, size < 63",
       f"{PHOTO}image_of_the_right_size_is_not_touched")
mutant("small image: without antialiasing", "task", "v2.Resize(self.frame, antialias=True)", "v2.Resize(self.frame, antialias=False)", SMALL)
mutant("small image: cropped", "task", "v2.Resize(self.frame, antialias=True)",
       "v2.Compose([v2.Resize(size, antialias=True), v2.CenterCrop(size)])", SMALL)
mutant("small image: shifted by a quarter", "task", "self.frame[0] // 8)", "self.frame[0] // 4)", SHIFTED)
mutant("small image: shifted by a tenth", "task", "self.frame[0] // 8)", "self.frame[0] // 10)", SHIFTED)
mutant("small image: not mirrored", "task", "draws, flip=True)", "draws, flip=False)", SHIFTED)
mutant("small image: shifted in evaluation", "task", "if self.small and self.training:", "if self.small:", SMALL)
SMALL_DRAWS = "keyed_uniform(self.seed, self.epoch, indices, 3)\n            windows"
mutant("small image: by the place in the batch", "task", SMALL_DRAWS,
       "keyed_uniform(self.seed, self.epoch, np.arange(len(indices)), 3)\n            windows", SMALL_KEYED)
mutant("small image: without the epoch", "task", SMALL_DRAWS, "keyed_uniform(self.seed, 0, indices, 3)\n            windows", SMALL_KEYED)
mutant("small image: without the seed", "task", SMALL_DRAWS, "keyed_uniform(0, self.epoch, indices, 3)\n            windows", SMALL_KEYED)
mutant("images: two of five are mirrored", "task", "draws[:, 2] < 0.5", "draws[:, 2] < 0.4", DRAWS)
mutant("images: the other half is mirrored", "task", "draws[:, 2] < 0.5", "draws[:, 2] >= 0.5", DRAWS)
mutant("images: rows for columns", "task", "windows[index, :, rows, columns]", "windows[index, :, columns, rows]", DRAWS)
mutant("images: never shifted to the end", "task", "(draws[:, :2] * windows.shape[2])", "(draws[:, :2] * (windows.shape[2] - 1))", DRAWS)
mutant("images: upside down", "task", "images[mirrored, ..., ::-1]", "images[mirrored, ..., ::-1, :]", DRAWS)
mutant("folders: test before val", "task", '("val", "test") if (root', '("test", "val") if (root', FOLDERS)
mutant("folders: augmented in evaluation", "task", "training=False, seed", "training=True, seed", FOLDERS)
mutant("folders: without the seed", "task", "training=True, seed=args.seed", "training=True, seed=0", FOLDERS)
mutant("folders: --image-size ignored", "task", 'args.image_size or DATASETS["imagefolder"][1]', 'DATASETS["imagefolder"][1]', FOLDERS)
mutant("folders: one class more", "task", "sum(folder.is_dir() for", "1 + sum(folder.is_dir() for", FOLDERS)
mutant("arrays: fashion is never mirrored", "task", 'flip = args.dataset != "mnist"', 'flip = args.dataset not in ("mnist", "fashion-mnist")',
       ARRAYS)
mutant("arrays: digits are mirrored", "task", 'flip = args.dataset != "mnist"', "flip = True", ARRAYS)
mutant("arrays: shifted by a quarter", "task", '"shift": images.shape[-1] // 8', '"shift": images.shape[-1] // 4', ARRAYS)
mutant("arrays: turned", "task", "images.permute(0, 3, 1, 2)", "images.permute(0, 3, 2, 1)", ARRAYS)
mutant("arrays: augmented in evaluation", "task", "        if train:\n            flip", "        if True:\n            flip", ARRAYS)
mutant("synthetic: --image-size ignored", "task", "args.image_size or side, args.image_size or side)", "side, side)",
       f"{PHOTO}synthetic_images_cost_nothing_and_have_the_size_that_was_asked_for")
mutant("normalise: blue for red", "task", "(123.7, 116.3, 103.5), (58.4, 57.1, 57.4)", "(103.5, 116.3, 123.7), (57.4, 57.1, 58.4)", CONSTANTS)
mutant("normalise: spread of another set", "task", "(63.0, 62.1, 66.7)", "(68.2, 65.4, 70.4)", CONSTANTS)
mutant("normalise: mean of another set", "task", "(33.3,), (78.6,)", "(72.9,), (78.6,)", CONSTANTS)
mutant("normalise: another mean of the digits", "task", "(73.3,), (90.2,)", "(78.3,), (90.2,)", CONSTANTS)
mutant("normalise: divided first", "task", "return ((images.to(dtype) - shift) / scale,)", "return (images.to(dtype) / scale - shift,)", NORMALISED)
mutant("normalise: not divided", "task", "return ((images.to(dtype) - shift) / scale,)", "return (images.to(dtype) - shift,)", NORMALISED)
mutant("normalise: the first channel's for all", "task", "torch.tensor(values, device=device, dtype=dtype).view(-1, 1, 1)",
       "torch.tensor(values[:1], device=device, dtype=dtype).view(-1, 1, 1)", NORMALISED)
mutant("normalise: constants in float32", "task", "torch.tensor(values, device=device, dtype=dtype).view(-1, 1, 1)",
       "torch.tensor(values, device=device).view(-1, 1, 1)", NORMALISED)
mutant("normalise: in float32", "task", "dtype = getattr(torch, args.dtype)", "dtype = torch.float32", NORMALISED)
mutant("resnet9: logits twice as large", "task", "self.head(features) * 0.125", "self.head(features) * 0.25",
       f"{PHOTO}logits_of_resnet9_are_an_eighth_of_its_head")

HALVES = "sync_batchnorm::test_half_precision_is_normalised_by_statistics_in_float32"
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

WINS, WINNER = f"{TWO}stronger_signal_wins_whichever_comes_first", f"{TWO}stronger_signal_wins_on_whichever_rank"
REMEMBER = "self.received = max(self.received, list(SIGNALS).index(number) + 1)"
mutant("signals: the last one wins", "machinery/run", REMEMBER, "self.received = list(SIGNALS).index(number) + 1", WINS)
mutant("signals: the first one wins", "machinery/run", REMEMBER, "self.received = self.received or list(SIGNALS).index(number) + 1", WINS)
mutant("signals: the weaker one wins", "machinery/run", REMEMBER,
       "self.received = min(self.received or 9, list(SIGNALS).index(number) + 1)", WINS)
mutant("signals: Ctrl-C is stronger than the system", "machinery/processes", "signal.SIGINT: 130, signal.SIGTERM: 143}", "signal.SIGTERM: 143, signal.SIGINT: 130}",
       WINS)
mutant("signals: SLURM's warning is the strongest", "machinery/processes", "{signal.SIGUSR1: 0, signal.SIGINT: 130, signal.SIGTERM: 143}",
       "{signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGUSR1: 0}", WINS)
mutant("signals: the weaker one of the ranks wins", "machinery/run", "return list(SIGNALS)[flag - 1]", "return list(SIGNALS)[-flag]", WINNER)
mutant("signals: ranks wait in every step", "machinery/run", "agreed = self.pending if wait else earlier", "agreed = self.pending", WINNER)
mutant("stop: names another signal", "machinery/run", 'f"stopped by {self.stopping.name} {step}"', 'f"stopped by {list(SIGNALS)[0].name} {step}"',
       f"{TWO}stop_says_what_it_saved_and_ends_with_its_code")
mutant("stop: what was not saved was saved", "machinery/run", "refused = broadcast_object(self.refused)\n            step", 'refused = ""\n            step',
       f"{TWO}stop_that_could_not_be_saved_says_so")

ROW, PROCESSES, TURN = f"{SUMS}row_of_one_device", f"{SUMS}row_of_several_processes", f"{SUMS}turns_time_only_the_steps_that_count"
TABLE, START = f"{SUMS}table_shows_each_row_and_its_share_of_one_device", f"{SUMS}start_up_is_the_median_of_turns"
mutant("bench: the mean turn", "tools/bench", "middle = {name: median(times)", "middle = {name: mean(times)", ROW)
mutant("bench: the fastest turn", "tools/bench", "middle = {name: median(times)", "middle = {name: min(times)", ROW)
mutant("bench: ratios upside down", "tools/bench", "ratios = [bare / script for", "ratios = [script / bare for", ROW)
mutant("bench: ratio of the medians", "tools/bench", '{"ratio": median(ratios),', '{"ratio": middle["bare"] / middle["script"],', ROW)
mutant("bench: range upside down", "tools/bench", '"ratio_min": min(ratios), "ratio_max": max(ratios)', '"ratio_min": max(ratios), "ratio_max": min(ratios)',
       ROW)
mutant("bench: the smallest process", "tools/bench", 'max(rank["peak_mib"] for', 'min(rank["peak_mib"] for', PROCESSES)
mutant("bench: bytes of rank 0", "tools/bench", 'mean(rank["bytes_sent"] for rank in ranks)', 'ranks[0]["bytes_sent"]', PROCESSES)
mutant("bench: bytes of all ranks", "tools/bench", 'mean(rank["bytes_sent"] for rank in ranks)', 'sum(rank["bytes_sent"] for rank in ranks)', PROCESSES)
mutant("bench: replicas send", "tools/bench", "ring_bytes(gradient_bytes, n)", "ring_bytes(gradient_bytes, devices)", f"{SUMS}row_of_replicas")
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
       f"{SUMS}bare_loop_makes_the_step_of_the_script[single]")
mutant("bench: bare loop trains the script's network", "tools/bench", "copy.deepcopy(run.state.net)", "run.state.net",
       f"{SUMS}bare_loop_makes_the_step_of_the_script[single]")
mutant("bench: one device is N", "tools/bench", 'share = 1 if args.kind == "cpu" else row["devices"]', "share = 1",
       f"{SUMS}accelerators_share_nothing")
mutant("bench: cores are devices", "tools/bench", 'share = 1 if args.kind == "cpu" else row["devices"]', 'share = row["devices"]', TABLE)
mutant("bench: scaled by the bare loop", "tools/bench", 'row["script"] / one', 'row["bare"] / one', TABLE)
mutant("bench: start-up once", "tools/bench", "min(3, args.repeats)", "min(1, args.repeats)", TABLE)
mutant("bench: the fastest start-up", "tools/bench", "return {name: median(times) for name, times in seconds", "return {name: min(times) for name, times in seconds",
       START)
mutant("bench: start-up until the first line", "tools/bench", 'if not any("step 1/" in line', 'if not any("" in line', START)
mutant("bench: start-up in the ranks' world", "tools/bench", "os.environ.items() if name not in OF_WORKERS}", "os.environ.items()}", START)
mutant("bench: MiB for MB", "tools/bench", 'row["bytes_formula"] / 1e6,', 'row["bytes_formula"] / 2**20,', TABLE)
mutant("bench: columns swapped", "tools/bench", 'f"{row[\'bare\']:.0f}", f"{row[\'script\']:.0f}"]', 'f"{row[\'script\']:.0f}", f"{row[\'bare\']:.0f}"]', TABLE)
mutant("bench: exit code of a failed worker", "tools/bench", "code, words = codes[index],", "code, words = 1,",
       f"{SUMS}failing_worker_is_told_by_the_last_line_of_its_log")
mutant("bench: a worker that lost another is blamed", "tools/bench", "if codes[index] == LOST:", "if False:",
       f"{SUMS}failing_worker_is_told_by_the_last_line_of_its_log")

# ------------------------------------------------------------------------------ defaults, constants, messages

mutant("warm-up: cut down", "common",
       "round(warmup_epochs * steps_per_epoch)",
       "int(warmup_epochs * steps_per_epoch)",
       "training_math::test_warmup_is_rounded_to_the_nearest_step")
mutant("cosine: rises again after the end", "common",
       "min(1.0, (step - start) / max(1, end - start))",
       "(step - start) / max(1, end - start)",
       "training_math::test_cosine_stays_at_zero_after_its_end_and_a_run_may_be_all_warmup")
mutant("cosine: nothing but warm-up divides by zero", "common",
       "(step - start) / max(1, end - start)",
       "(step - start) / (end - start)",
       "training_math::test_cosine_stays_at_zero_after_its_end_and_a_run_may_be_all_warmup")
mutant("scaler: another first scale", "common",
       "2.0**16",
       "2.0**10",
       "training_math::test_scaler_skips_and_counts_non_finite_gradients_at_every_precision", "training_math::test_scaler_keeps_the_norm_of_the_true_gradient")
mutant("powersgd: another rank", "common",
       '"matrix_approximation_rank": 4',
       '"matrix_approximation_rank": 1',
       "defaults::test_settings_of_powersgd")
mutant("powersgd: compresses from the first step", "common",
       '"start_powerSGD_iter": 10',
       '"start_powerSGD_iter": 2',
       "defaults::test_settings_of_powersgd")
mutant("channels last: ignored", "machinery/tasks",
       "torch.channels_last if args.channels_last else torch.contiguous_format",
       "torch.contiguous_format",
       "training_math::test_filters_are_stored_as_asked")
mutant("channels last: always", "machinery/tasks",
       "torch.channels_last if args.channels_last else torch.contiguous_format",
       "torch.channels_last",
       "training_math::test_filters_are_stored_as_asked")
mutant("freeze: all may be frozen", "common",
       "if frozen == len(parameters):",
       "if False:",
       "cli::test_bad_input_is_refused_by_name")
mutant("freeze: says how many are left", "common",
       'print0(f"frozen: {frozen} of',
       'print0(f"frozen: {len(list(net.parameters())) - frozen} of',
       "defaults::test_build_says_how_many_tensors_are_frozen")
mutant("weights: number of the file's tensors", "common",
       'print0(f"weights: {len(fits)} of',
       'print0(f"weights: {len(given)} of',
       "data_and_models::test_weights_of_another_network_are_loaded_as_far_as_they_fit_and_the_rest_is_named")
mutant("weights: extra ones not named", "common",
       "if extra := [name for name in given if name not in own]:",
       "if extra := []:",
       "data_and_models::test_weights_of_another_network_are_loaded_as_far_as_they_fit_and_the_rest_is_named")
mutant("meter: sums of another world to rank 1", "common",
       "sum(of) * (get_rank() == 0)",
       "sum(of) * (get_rank() == get_world_size() - 1 > 0)",
       "training_math::test_sums_of_ranks_go_back_to_the_ranks", "training_math::test_meter_goes_on_from_its_sums")
mutant("evaluation: one seed for all batches", "sampling",
       "seed_rng(seed, -1, i * world_size + rank)",
       "seed_rng(seed, -1, rank)",
       "odd_tasks::test_seeds_of_an_evaluation_are_no_seeds_of_training", "odd_tasks::test_evaluation_repeats_what_it_draws")
mutant("evaluation: larger batches", "sampling",
       "min(batch_size, math.ceil(length / 8))",
       "math.ceil(length / 8)",
       "sampling::test_evaluation_batches_occupy_eight_ranks")
mutant("evaluation: a quarter in a batch", "sampling",
       "math.ceil(length / 8)",
       "math.ceil(length / 4)",
       "sampling::test_evaluation_batches_occupy_eight_ranks")
mutant("evaluation: an eighth, rounded down", "sampling",
       "math.ceil(length / 8)",
       "max(1, length // 8)",
       "sampling::test_evaluation_batches_occupy_eight_ranks")
mutant("loader: sixteen workers", "sampling",
       "min(8, torch.get_num_threads())",
       "min(16, torch.get_num_threads())",
       "sampling::test_loader_has_a_worker_for_each_core_and_pins")
mutant("loader: one worker", "sampling",
       "min(8, torch.get_num_threads())",
       "1",
       "sampling::test_loader_has_a_worker_for_each_core_and_pins")
mutant("loader: nothing is pinned", "sampling",
       '{"pin_memory": device.type != "cpu"}',
       '{"pin_memory": False}',
       "sampling::test_loader_has_a_worker_for_each_core_and_pins")
mutant("data: --skip-corrupt stops at the last", "sampling",
       "(*range(first, len(self.dataset)), *range(first))",
       "range(first, len(self.dataset))",
       "endings::test_broken_sample_is_named_or_replaced_alike_everywhere")
mutant("tensorboard: resumed without purging", "machinery/files",
       'purge = checkpoint["global_step"] + 1 if checkpoint else None',
       "purge = None",
       "log_figures::test_tensorboard_goes_on_after_the_step_of_the_checkpoint")
mutant("tensorboard: purges its last step", "machinery/files",
       'purge = checkpoint["global_step"] + 1 if',
       'purge = checkpoint["global_step"] if',
       "log_figures::test_tensorboard_goes_on_after_the_step_of_the_checkpoint")
mutant("log: the line of the checkpoint's own step is cut off", "machinery/files",
       'entry["global_step"] <= checkpoint["global_step"]',
       'entry["global_step"] < checkpoint["global_step"]',
       "checkpoint::test_log_is_cut_back_to_the_checkpoint_even_if_its_last_line_is_torn")
mutant("log: a torn last line is kept", "machinery/files",
       'if not done or not line.endswith("\\n"):',
       "if not done:",
       "log_figures::test_log_stays_whole_lines_after_a_resume")
mutant("log: length in characters", "machinery/files",
       "kept += len(line.encode())",
       "kept += len(line)",
       "log_figures::test_log_stays_whole_lines_after_a_resume")
mutant("save: the last names of what is not finite", "machinery/files",
       "bad[:5]",
       "bad[-5:]",
       "defaults::test_five_names_are_enough")
mutant("resume: fused of the other device", "machinery/run",
       'group["fused"] = now["fused"]',
       "pass",
       "defaults::test_optimizer_of_an_accelerator_goes_on_here")
mutant("nodes: port 29501", "machinery/options",
       '"PORT", 29500',
       '"PORT", 29501',
       "defaults::test_port_of_several_nodes")
mutant("slurm: one port for all jobs", "machinery/rendezvous",
       '20_000 + int(get("SLURM_JOB_ID")) % 10_000',
       "20_000",
       "pitfalls_29_42::test_pitfall_40_ranks_from_slurm", "pitfalls_29_42::test_pitfall_40_address_from_slurm")
mutant("task: its folder goes first", "machinery/tasks",
       "sys.path.append(folder)",
       "sys.path.insert(0, folder)",
       "defaults::test_neighbours_of_a_task_replace_nothing")
mutant("check: one sample", "machinery/check",
       "args, task, n = self.args, self.task, len(indices)",
       "indices = indices[:1]\n        args, task, n = self.args, self.task, len(indices)",
       "cli::test_bad_input_is_refused_by_name")
mutant("check: a metric named count", "machinery/check",
       'RESERVED = {"loss", "count", "event", "epoch", "global_step"}',
       'RESERVED = {"loss", "event", "epoch", "global_step"}',
       "defaults::test_names_that_the_log_uses_itself_are_no_metrics")
mutant("check: a metric named loss", "machinery/check",
       'RESERVED = {"loss", "count", "event", "epoch", "global_step"}',
       'RESERVED = {"count", "event", "epoch", "global_step"}',
       "defaults::test_names_that_the_log_uses_itself_are_no_metrics")
mutant("check: a read-only folder", "machinery/options",
       "os.access(folder, os.W_OK | os.X_OK)",
       "True",
       "cli::test_bad_input_is_refused_by_name")
mutant("options: metrics without their options", "machinery/tasks",
       "*(fill_in(path, function, args) for function in functions[2:])",
       "fill_in(path, functions[2], args), functions[3]",
       "defaults::test_options_of_a_loss_and_of_a_metric_are_filled_in")
mutant("launch: no restarts on one machine", "machinery/launch",
       "RESTARTS = 3",
       "RESTARTS = 0",
       "defaults::test_launcher_restarts_three_times_on_one_machine")
mutant("launch: what followed from a failure is its cause", "machinery/launch",
       "set(failed) == {LOST}",
       "LOST in failed",
       "defaults::test_cause_of_a_failure_is_not_what_followed_from_it")
mutant("plot: counts are drawn", "tools/plot",
       'COUNTS = {"event", "epoch", "step", "global_step", "count"}',
       'COUNTS = {"event", "epoch", "step", "global_step"}',
       "plot::test_axes_panels_and_lines")
mutant("plot: four columns", "tools/plot",
       "columns = min(3, len(panels))",
       "columns = min(4, len(panels))",
       "plot::test_axes_panels_and_lines")
mutant("plot: all lines of one width", "tools/plot",
       "width = 1 + 5 *",
       "width = 1 + 0 *",
       "plot::test_axes_panels_and_lines")
mutant("plot: a single point is not seen", "tools/plot",
       'marker="." if len(points) < 3 else ""',
       'marker=""',
       "plot::test_axes_panels_and_lines")
mutant("plot: events mixed", "tools/plot",
       'if line["event"] == event and line.get(name) is not None]',
       "if line.get(name) is not None]",
       "plot::test_axes_panels_and_lines")
mutant("plot: empty panels stay", "tools/plot",
       "        axis.remove()\n",
       "        pass\n",
       "plot::test_axes_panels_and_lines")
mutant("plot: any suffix", "tools/plot",
       'args.output.suffix not in (".svg", ".png", ".pdf") or',
       "",
       "plot::test_picture_that_cannot_be_written_is_refused")
mutant("sync-bn: converted on accelerators too", "machinery/stand_ins",
       'if device.type != "cpu":\n        return nn.Sync',
       "if False:\n        return nn.Sync",
       "sync_batchnorm::test_accelerators_have_torchs_own")
mutant("task: top-3 as top5", "task",
       "outputs.topk(min(5, outputs.shape[1]), dim=1)",
       "outputs.topk(min(3, outputs.shape[1]), dim=1)",
       "survivors::test_metrics_of_the_default_task")
mutant("task: fewer than five classes", "task",
       "outputs.topk(min(5, outputs.shape[1]), dim=1)",
       "outputs.topk(5, dim=1)",
       "photographs::test_fewer_than_five_classes_are_all_among_the_best_five")
mutant("task: note for photographs too", "task",
       "(args.image_size or side) < 64",
       "(args.image_size or side) < 640",
       "data_and_models::test_small_images_are_told_of_a_coarse_stem")
mutant("task: googlenet with two outputs", "task",
       '"aux_logits": False,',
       '"aux_logits": True,',
       "photographs::test_models_of_torchvision_have_one_output_and_the_classes_of_the_data")
mutant("task: digits not stretched", "task",
       ".unsqueeze(1) * 15",
       ".unsqueeze(1) * 16",
       "photographs::test_constants_of_every_data_set", "survivors::test_default_task_augments_by_the_seed_and_only_in_training")
mutant("task: digits not shifted", "task",
       "shift=1, seed=args.seed",
       "shift=0, seed=args.seed",
       "photographs::test_digits_are_shifted_by_one_pixel_in_training")
mutant("plot: loss on a linear axis", "tools/plot", '"log" if name in LOGARITHMIC and positive else "linear"', '"linear"',
       "plot::test_axes_panels_and_lines")
mutant("default: --epochs", "machinery/options",
       '"--epochs", positive, "N", 30,',
       '"--epochs", positive, "N", 20,',
       "defaults::test_defaults")
mutant("default: --batch-size", "machinery/options",
       '"--batch-size", positive, "N", 64,',
       '"--batch-size", positive, "N", 32,',
       "defaults::test_defaults")
mutant("default: --lr", "machinery/options",
       '"--lr", amount, "X", 0.1,',
       '"--lr", amount, "X", 0.01,',
       "defaults::test_defaults")
mutant("default: --momentum", "machinery/options",
       '"--momentum", share, "X", 0.9,',
       '"--momentum", share, "X", 0.95,',
       "defaults::test_defaults")
mutant("default: --weight-decay", "machinery/options",
       '"--weight-decay", amount, "X", 1e-3,',
       '"--weight-decay", amount, "X", 1e-4,',
       "defaults::test_defaults")
mutant("default: --log-every", "machinery/options",
       '"--log-every", positive, "STEPS", 50,',
       '"--log-every", positive, "STEPS", 10,',
       "defaults::test_defaults")
mutant("default: --timeout", "machinery/options",
       '"--timeout", number(float, 1, 10**9), "SECONDS", 600,',
       '"--timeout", number(float, 1, 10**9), "SECONDS", 1800,',
       "defaults::test_defaults")
mutant("default: --schedule", "machinery/options",
       '"--schedule", list(SCHEDULES), None, "cosine",',
       '"--schedule", list(SCHEDULES), None, "constant",',
       "defaults::test_defaults")
mutant("default: --label-smoothing", "machinery/options",
       '"--label-smoothing", share, "X", 0.1,',
       '"--label-smoothing", share, "X", 0.0,',
       "defaults::test_defaults")
mutant("range: --seed", "machinery/options",
       "number(int, 0, 2**63 - 1)",
       "number(int, 0, 2**63)",
       "defaults::test_ranges[seed]")
mutant("range: --image-size", "machinery/options",
       "number(int, 8)",
       "number(int, 1)",
       "defaults::test_ranges[image-size]")
mutant("range: ends are left out", "machinery/options",
       "if not low <= value <= high",
       "if not low < value <= high",
       "defaults::test_ranges")
mutant("range: the last is left out", "machinery/options",
       "if not low <= value <= high",
       "if not low <= value < high",
       "defaults::test_ranges")
mutant("resume: --deterministic is another run", "machinery/options",
       '"--deterministic", MAY_CHANGE,',
       '"--deterministic", NONE,',
       "defaults::test_what_may_change_at_resume[deterministic]")
mutant("resume: --tensorboard is another run", "machinery/options",
       '"--tensorboard", MAY_CHANGE,',
       '"--tensorboard", NONE,',
       "defaults::test_what_may_change_at_resume[tensorboard]")
mutant("resume: --amp is harmless", "machinery/options",
       '"--amp", ["off", "bf16", "fp16"], None, "off", NONE,',
       '"--amp", ["off", "bf16", "fp16"], None, "off", MAY_CHANGE,',
       "defaults::test_what_may_change_at_resume[amp]")
mutant("resume: --grad-compress is harmless", "machinery/options",
       '"--grad-compress", ["none", "bf16", "fp16", "powersgd"], None, "none", NONE,',
       '"--grad-compress", ["none", "bf16", "fp16", "powersgd"], None, "none", MAY_CHANGE,',
       "defaults::test_what_may_change_at_resume[grad_compress]")
mutant("eval-only: in another precision", "machinery/options",
       '"--dtype", ["float32", "float64"], None, "float32", EVALUATED,',
       '"--dtype", ["float32", "float64"], None, "float32", NONE,',
       "defaults::test_what_may_change_at_resume[dtype]")
mutant("eval-only: with another smoothing", "machinery/options",
       '"--label-smoothing", share, "X", 0.1, EVALUATED,',
       '"--label-smoothing", share, "X", 0.1, NONE,',
       "defaults::test_what_may_change_at_resume[label_smoothing]")
mutant("nodes: workers are compared", "machinery/options",
       '"--workers", whole, "N", None, FREE,',
       '"--workers", whole, "N", None, MAY_CHANGE,',
       "defaults::test_what_may_differ_between_nodes")
mutant("load: samples not looked at", "common",
       '"global_step", "samples"), int)',
       '"global_step"), int)',
       "defaults::test_checkpoint_lacks_nothing")
mutant("load: log not looked at", "common",
       '("log", "config"), dict)',
       '("config",), dict)',
       "defaults::test_checkpoint_lacks_nothing")
mutant("load: best of any kind", "common",
       '"best": (float, type(None))}',
       '"best": object}',
       "defaults::test_checkpoint_lacks_nothing")
mutant("folder: without the process", "machinery/files",
       "{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}",
       "{time.strftime('%Y%m%d-%H%M%S')}",
       "defaults::test_folder_of_a_run_without_a_name")
mutant("folder: without the model", "machinery/files",
       'f"runs/{args.dataset}-{args.model}-{run_id}"',
       'f"runs/{args.dataset}-{run_id}"',
       "defaults::test_folder_of_a_run_without_a_name")

mutant("drift: the smallest number has no negative", "common", "torch.cat([sums, ~sums])", "torch.cat([sums, 1 - sums])", DRIFTED)
mutant("drift: minus zero is overlooked", "common", "torch.cat([sums, ~sums])  # ~ and not -, which would overflow at the smallest number\n    dist.all_reduce(extremes, op=dist.ReduceOp.MAX)  # the largest, and in reverse order the smallest\n    largest, smallest = extremes[: len(sums)].tolist(), (~extremes[len(sums) :]).tolist()",
       "torch.cat([sums, -sums])\n    dist.all_reduce(extremes, op=dist.ReduceOp.MAX)\n    largest, smallest = extremes[: len(sums)].tolist(), (-extremes[len(sums) :]).tolist()", DRIFTED)

# fmt: on
