"""Mutants of sampling.py and task.py."""

from mutants_base import AUGMENTED, NOISE, ORDER, PIECES, SHARDS, UNIFORM, mutant

# One fault takes two or three lines here, and not seven.
# fmt: off

# ------------------------------------------------------------------------------------------------------------------------------ sampling.py

OF_EPOCH = "splitmix64(self.seed, self.epoch, -1)"
mutant("order: the same every epoch", "sampling", OF_EPOCH, "splitmix64(self.seed, 0, -1)", ORDER)
mutant("order: without the seed", "sampling", OF_EPOCH, "splitmix64(0, self.epoch, -1)", ORDER)
mutant("order: seed 1, epoch 0 is seed 0, epoch 1", "sampling", OF_EPOCH, "splitmix64(self.seed + self.epoch, -1)",
       "test_orders_of_epochs_and_seeds_are_independent[40]")
mutant("order: the whole epoch is computed for each batch", "sampling", "self._order(torch.cat(slices).numpy())",
       "self._order(np.arange(self.length))[torch.cat(slices).numpy()]", "test_a_batch_takes_the_memory_of_a_batch[balanced]")
RANDOM = "test_order_is_as_random_as_randperm[by_permuted-look_at"
mutant("permuted: five rounds", "sampling", "for i in range(6)]", "for i in range(5)]", f"{RANDOM}_long_orders]")
mutant("permuted: linear rounds", "sampling", "bits * bits >> MIDDLE", "bits >> MIDDLE", f"{RANDOM}_long_orders]")
mutant("permuted: rounds that do not mix", "sampling", "(right + round_key) * MIX", "right + round_key", f"{RANDOM}_long_orders]")
mutant("permuted: ten samples by the network", "sampling", "if length <= 1024:", "if length <= 1024 and length != 10:",
       f"{RANDOM}_short_orders]")
ONCE = "test_order_has_every_sample_once_whatever_part_is_asked_for"
mutant("permuted: what lands beyond the length stays there", "sampling", "if beyond.any():", "if False:", ONCE)
mutant("permuted: what lands beyond the length goes to the front", "sampling", "permuted(samples[beyond], length, key)",
       "samples[beyond] - length", ONCE)
mutant("permuted: many places beyond the length", "sampling", "-length % tried", "length % tried",
       "test_few_places_of_the_grid_lie_beyond_the_length")
mutant("sampler: a resumed epoch starts anew", "sampling", "range(step, self.steps_per_epoch)", "range(self.steps_per_epoch)",
       "test_resuming_at_any_step_yields_exactly_the_rest[1]")
mutant("sampler: all ranks take the same piece", "sampling", "tensor_split(self.world_size)[self.rank] for",
       "tensor_split(self.world_size)[0] for", PIECES)
mutant("sampler: strided pieces", "sampling", "m.tensor_split(self.world_size)[self.rank] for",
       "m[self.rank :: self.world_size] for", PIECES)
mutant("sampler: torch.chunk, which may leave a rank without samples", "sampling", "m.tensor_split(self.world_size)[self.rank] for",
       "(*m.chunk(self.world_size), *[m[:0]] * self.world_size)[self.rank] for",
       "test_pieces_of_all_ranks_partition_each_global_batch[4]")
mutant("sampler: micro-batches cut after the ranks", "sampling", "batch.tensor_split(self.accum_steps)", "[batch]",
       "test_micro_batches_of_all_ranks_are_those_of_one_device[2-2]")
mutant("compile: how the constants are made is compiled", "task", "if args.compile:", "if False:", "test_compiled_model_makes_its_constants_once")
mutant("sampler: the ragged tail is kept", "sampling", "steps_per_epoch = length // batch_size",
       "steps_per_epoch = math.ceil(length / batch_size)", PIECES)
mutant("sampler: an empty epoch is accepted", "sampling", "if batch_size > length:", "if False:",
       "test_empty_epoch_is_an_error_that_names_both_numbers")
mutant("evaluation: shards padded to the same length", "sampling", "min(start + self.batch_size, self.length)",
       "start + self.batch_size", SHARDS)
mutant("evaluation: every rank starts at sample 0", "sampling", "[rank::world_size]", "[0::world_size]", SHARDS)
mutant("evaluation: the last batch is dropped", "sampling", "self.steps = range(0, length, self.batch_size)[",
       "self.steps = range(0, length - self.batch_size + 1, self.batch_size)[", SHARDS)
mutant("augmentation: no seed per sample", "sampling", "seed_generators(sample_key(index))", "pass",
       f"{AUGMENTED}[3-1-0-per sample]")
mutant("augmentation: per-sample seed without the epoch", "sampling", "splitmix64(KeyedDataset.epoch_key, index)", "splitmix64(0, index)",
       f"{AUGMENTED}[0-3-0-per sample]")
mutant("augmentation: per-sample seed without the index", "sampling", "seed_generators(sample_key(index))", "seed_generators(sample_key(0))",
       "test_pitfall_08_augmentation_differs_between_workers_and_epochs")
KEY = "KeyedDataset.epoch_key = splitmix64(self.seed, epoch)"
mutant("augmentation: the epoch is not told", "sampling", KEY, KEY.replace("KeyedDataset", "self"), f"{AUGMENTED}[0-3-0-in memory]")
mutant("augmentation: keys without the epoch", "sampling", KEY, KEY.replace("epoch)", "0)"), f"{AUGMENTED}[0-3-0-in memory]")
mutant("augmentation: keys without the seed", "sampling", KEY, KEY.replace("self.seed", "0"), "test_small_image_files_are_keyed_by_the_sample")
mutant("augmentation: only the first epoch is told", "sampling", KEY, KEY.replace("= split", "= KeyedDataset.epoch_key or split"),
       f"{AUGMENTED}[0-3-0-in memory]")
mutant("augmentation: draws without the key", "sampling", "splitmix64(KeyedDataset.epoch_key, keys", "splitmix64(0, keys", UNIFORM)
mutant("augmentation: draws without the index", "sampling", "keys, columns)", "np.zeros_like(keys), columns)", UNIFORM)
mutant("loader: workers started anew every epoch", "sampling", '{"persistent_workers": True, ', "{",
       "test_pitfall_38_workers_stay_and_cores_are_divided")
mutant("loader: workers do not ignore signals", "sampling", "signal.signal(number, signal.SIG_IGN)", "pass", "test_pitfall_11_sigterm_saves[2]")
mutant("loader: workers not ended at exit", "sampling", "multiprocessing.util.Finalize(None, _kill, (processes,), exitpriority=100)", "pass",
       "test_process_that_keeps_the_error_of_a_loader_can_end")
mutant("seed_rng: without the step", "sampling", "splitmix64(seed, step, micro_batch) %", "splitmix64(seed, micro_batch) %",
       "test_dropout_seed_of_replica_r_is_that_of_rank_r")
mutant("seed_rng: without the rank", "sampling", "% 2**63 + rank", "% 2**63",
       "test_dropout_seed_of_replica_r_is_that_of_rank_r")
mutant("seed_rng: without the seed", "sampling", "splitmix64(seed, step, micro_batch) %", "splitmix64(0, step, micro_batch) %",
       "test_dropout_seed_of_replica_r_is_that_of_rank_r")
mutant("data: --skip-corrupt ignored", "sampling", "if not self.skip_corrupt:", "if True:",
       "test_broken_sample_is_named_or_replaced_alike_everywhere")
mutant("data: the replacement is drawn as the broken one", "sampling",
       "seed_generators(sample_key(index))", "seed_generators(sample_key(first))",
       "test_broken_sample_is_named_or_replaced_alike_everywhere")
mutant("workers: start when the ranks have met", "sampling", "        processes = iter(loader)._workers\n", "        processes = []\n",
       "test_workers_start_before_there_are_threads_whose_locks_a_fork_would_copy[ddp]")
mutant("workers: load what is not wanted", "sampling", "        sampler.steps = ()", "        pass",
       "test_workers_load_nothing_that_a_resumed_run_skips")
mutant("balanced: every sample equally often", "sampling", "if not self.balanced:", "if True:",
       "test_balanced_draws_every_class_equally_often_and_every_sample_of_it")
mutant("balanced: the first of each class alone", "sampling",
       "[drawn] - 1 - member", "[drawn] - 1",
       "test_balanced_draws_every_class_equally_often_and_every_sample_of_it")
mutant("balanced: class and sample by one draw", "sampling", "positions.astype(np.uint64), 1)", "positions.astype(np.uint64), 0)",
       "test_balanced_draws_every_class_equally_often_and_every_sample_of_it")
mutant("balanced: drawn by the place in the batch", "sampling", "drawn = splitmix64(order_key, positions.astype(np.uint64), 0)",
       "drawn = splitmix64(order_key, np.arange(len(positions), dtype=np.uint64), 0)",
       "test_balanced_order_is_the_same_at_any_world_size")
mutant("balanced: without targets, not balanced", "sampling", "if targets.shape != (len(dataset),):",
       "if False:", "test_balanced_needs_the_class_of_each_sample")
mutant("data: a broken image in a batch ends the run", "sampling",
       "        except OSError:\n            readable",
       "        except KeyError:\n            readable",
       "test_broken_image_is_named_or_replaced_in_a_whole_batch_too")
mutant("wrapped: names that are passed on count", "sampling", 'getattr(type(dataset), "whole_batches", False)',
       'getattr(dataset, "whole_batches", False)', "test_wrapper_that_passes_names_on_is_asked_itself")
mutant("evaluation: ranks draw alike", "sampling", "i * world_size + rank)  # no", "i)  # no",
       f"{NOISE}_is_the_same_in_every_mode[ddp-2]")
mutant("evaluation: seeds of training", "sampling", "seed_rng(seed, -1, i *", "seed_rng(seed, 0, i *",
       "test_seeds_of_an_evaluation_are_no_seeds_of_training")
mutant("evaluation: batches depend on the world size", "sampling", "math.ceil(length / 8))", "math.ceil(length / 8 / world_size))",
       "test_evaluation_batches_are_the_same_at_every_world_size")
mutant("evaluation: one rank has it all", "sampling", "min(batch_size, math.ceil(length / 8))", "batch_size",
       "test_evaluation_batches_are_the_same_at_every_world_size")

for generator in ("random.seed(bits)", "np.random.seed(bits % 2**32)", "torch.default_generator.manual_seed(bits)"):
    mutant(f"seeds: without {generator}", "sampling", f"    {generator}\n", "", "test_seeds_of_an_evaluation_are_no_seeds_of_training")
mutant("evaluation: one seed for all batches", "sampling",
       "seed_rng(seed, -1, i * world_size + rank)",
       "seed_rng(seed, -1, rank)",
       "test_seeds_of_an_evaluation_are_no_seeds_of_training", "test_evaluation_repeats_what_it_draws")
mutant("evaluation: larger batches", "sampling",
       "min(batch_size, math.ceil(length / 8))",
       "math.ceil(length / 8)",
       "test_evaluation_batches_occupy_eight_ranks")
mutant("evaluation: a quarter in a batch", "sampling",
       "math.ceil(length / 8)",
       "math.ceil(length / 4)",
       "test_evaluation_batches_occupy_eight_ranks")
mutant("evaluation: an eighth, rounded down", "sampling",
       "math.ceil(length / 8)",
       "max(1, length // 8)",
       "test_evaluation_batches_occupy_eight_ranks")
mutant("loader: sixteen workers", "sampling",
       "min(8, own_cores())",
       "min(16, own_cores())",
       "test_loader_has_a_worker_for_each_core_and_pins")
mutant("loader: one worker", "sampling",
       "min(8, own_cores())",
       "1",
       "test_loader_has_a_worker_for_each_core_and_pins")
mutant("loader: nothing is pinned", "sampling",
       '{"pin_memory": device.type != "cpu"}',
       '{"pin_memory": False}',
       "test_loader_has_a_worker_for_each_core_and_pins")
mutant("data: --skip-corrupt stops at the last", "sampling",
       "itertools.chain(range(first, len(self.dataset)), range(first))",
       "range(first, len(self.dataset))",
       "test_broken_sample_is_named_or_replaced_alike_everywhere")
mutant("data: a list of all samples for each", "sampling",
       "itertools.chain(range(first, len(self.dataset)), range(first))",
       "(*range(first, len(self.dataset)), *range(first))",
       "test_a_sample_takes_the_memory_of_a_sample")

# ---------------------------------------------------------------------------------------------------------------------------------- task.py

mutant("data: a broken file is not named", "task", 'raise OSError(f"{os.fsdecode(paths[0])}: {error}") from None', "raise",
       "test_broken_image_file_is_named")
mutant("task: augmentation by the place in the batch", "task",
       "keyed_uniform(indices, 3)\n        images = shift",
       "keyed_uniform(np.arange(len(indices)), 3)\n        images = shift",
       f"{AUGMENTED}[0-3-0-in memory]")
mutant("task: held-out images augmented", "task", "ImagesInMemory(images[1437:], labels[1437:])",
       "ImagesInMemory(images[1437:], labels[1437:], shift=1)", "test_default_task_augments_by_the_seed_and_only_in_training")
mutant("task: trained on held-out images", "task", "ImagesInMemory(images[:1437], labels[:1437]", "ImagesInMemory(images, labels",
       "test_digits_are_split_as_the_licence_note_says")
mutant("task: label smoothing ignored", "task", ", label_smoothing=label_smoothing)", ")",
       "test_label_smoothing_reaches_the_loss")
mutant("task: top1 is the worst guess", "task", '"top1": hits[:, 0]', '"top1": hits[:, -1]', "test_metrics_of_the_default_task")
mutant("task: shift to one side only", "task", "* windows.shape[2]).astype(int)", "* (windows.shape[2] // 2 + 1)).astype(int)",
       "test_shift_moves_the_image_by_at_most_one_pixel")
mutant("task: every image mirrored", "task", "mirrored = draws[:, 2] < 0.5", "mirrored = draws[:, 2] < 1.5",
       "test_flip_mirrors_about_every_second_image_and_shift_cuts_a_window")
mutant("task: --download by all at once", "task",
       "file_lock(args.data_dir) if args.download else contextlib.nullcontext()",
       "contextlib.nullcontext()", "test_torchvision_sets_are_downloaded_under_the_lock")
mutant("download: no lock", "task", "fcntl.flock(descriptor, fcntl.LOCK_EX)", "pass", "test_one_process_at_a_time_downloads")
mutant("image: the lower byte of sixteen bits", "task", 'image.mode.startswith("I")', "False",
       "test_files_that_torchvision_cannot_decode_are_read_by_pil")
JPEGS = "test_jpeg_files_are_decoded_together_and_each_as_if_alone"
mutant("images: decoded one by one", "task", "16 if self.small else 1", "1", JPEGS)
mutant("images: a whole batch of photographs in memory", "task", "16 if self.small else 1", "16", JPEGS)
mutant("images: one of another kind ends the run", "task", "(Exception):  # one is no", "(KeyError):  #", JPEGS)
mutant("options: --image-size without effect", "task", "if args.image_size and args.dataset not in", "if False and args.dataset not in",
       "test_image_size_without_effect_is_refused[digits-folder0]")
MIDDLE = "test_evaluation_resizes_the_shorter_side_and_takes_the_middle"
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
       "test_training_crops_are_of_any_size_and_shape_within_the_recipe")
mutant("photograph: square crops", "task", CROP, "v2.RandomResizedCrop(size, ratio=(1.0, 1.0), antialias=True)",
       "test_training_crops_are_of_any_size_and_shape_within_the_recipe")
RECIPE, SMALL = "test_crop_is_made_as_torchvision_makes_it", "test_small_images_fill_the_frame"
mutant("photograph: cropped without antialiasing", "task", CROP, "v2.RandomResizedCrop(size, antialias=False)", RECIPE)
mutant("photograph: never mirrored", "task", ", v2.RandomHorizontalFlip()]", "]", "test_half_of_the_crops_are_mirrored")
mutant("photograph: always mirrored", "task", "v2.RandomHorizontalFlip()]", "v2.RandomHorizontalFlip(1.0)]",
       "test_half_of_the_crops_are_mirrored")
mutant("photograph: upside down", "task", "v2.RandomHorizontalFlip()]", "v2.RandomVerticalFlip()]", RECIPE)
SHIFTED, KEYED_CROP = "test_small_images_are_shifted_by_an_eighth_and_half_of_them_mirrored", "test_crop_is_keyed_by_the_sample_the_epoch_and_the_seed"
FIT = "torch.default_generator.manual_seed(sample_key(index))"
mutant("photograph: crop without the seed and the epoch", "task", FIT, FIT.replace("sample_key(index)", "index"), KEYED_CROP)
mutant("photograph: crop without the sample", "task", FIT, FIT.replace("index", "0"), KEYED_CROP)
mutant("photograph: crop by what was drawn before", "task", FIT, "str()", KEYED_CROP)
mutant("photograph: 64 pixels are small", "task", "training, size < 64", "training, size <= 64", MIDDLE)
mutant("photograph: 63 pixels are not small", "task", "training, size < 64", "training, size < 63",
       "test_image_of_the_right_size_is_not_touched")
mutant("small image: without antialiasing", "task", "v2.Resize(self.frame, antialias=True)", "v2.Resize(self.frame, antialias=False)", SMALL)
mutant("small image: cropped", "task", "v2.Resize(self.frame, antialias=True)",
       "v2.Compose([v2.Resize(size, antialias=True), v2.CenterCrop(size)])", SMALL)
mutant("small image: shifted by a quarter", "task", "self.frame[0] // 8)", "self.frame[0] // 4)", SHIFTED)
mutant("small image: shifted by a tenth", "task", "self.frame[0] // 8)", "self.frame[0] // 10)", SHIFTED)
mutant("small image: not mirrored", "task", "draws, flip=True)", "draws, flip=False)", SHIFTED)
mutant("small image: shifted in evaluation", "task", "if self.small and self.training:", "if self.small:", SMALL)
SMALL_KEYED, FOLDERS = "test_small_image_files_are_keyed_by_the_sample", "test_folders_are_classes_and_val_goes_before_test"
mutant("small image: by the place in the batch", "task", "keyed_uniform(indices, 3)\n            windows",
       "keyed_uniform(np.arange(len(indices)), 3)\n            windows", SMALL_KEYED)
DRAWS, ARRAYS = "test_draws_decide_the_window_and_the_mirroring", "test_arrays_are_augmented_in_training_only"
mutant("images: two of five are mirrored", "task", "draws[:, 2] < 0.5", "draws[:, 2] < 0.4", DRAWS)
mutant("images: the other half is mirrored", "task", "draws[:, 2] < 0.5", "draws[:, 2] >= 0.5", DRAWS)
mutant("images: rows for columns", "task", "windows[index, :, rows, columns]", "windows[index, :, columns, rows]", DRAWS)
mutant("images: never shifted to the end", "task", "(draws[:, :2] * windows.shape[2])", "(draws[:, :2] * (windows.shape[2] - 1))", DRAWS)
mutant("images: upside down", "task", "images[mirrored, ..., ::-1]", "images[mirrored, ..., ::-1, :]", DRAWS)
mutant("folders: test before val", "task", '("val", "test") if (root', '("test", "val") if (root', FOLDERS)
mutant("folders: augmented in evaluation", "task", "ImageFiles(val.samples, size, False)", "ImageFiles(val.samples, size, True)", FOLDERS)
mutant("folders: not augmented in training", "task", "ImageFiles(train.samples, size, True)", "ImageFiles(train.samples, size, False)", FOLDERS)
mutant("folders: --image-size ignored", "task", 'args.image_size or DATASETS["imagefolder"][1]', 'DATASETS["imagefolder"][1]', FOLDERS)
mutant("folders: one class more", "task", "sum(folder.is_dir() for", "1 + sum(folder.is_dir() for", FOLDERS)
FLIP = 'flip = train and args.dataset != "mnist"'
mutant("arrays: fashion is never mirrored", "task", FLIP, 'flip = train and args.dataset not in ("mnist", "fashion-mnist")', ARRAYS)
mutant("arrays: digits are mirrored", "task", FLIP, "flip = train", ARRAYS)
mutant("arrays: mirrored in evaluation", "task", FLIP, 'flip = args.dataset != "mnist"', ARRAYS)
mutant("arrays: shifted by a quarter", "task", "images.shape[-1] // 8 if", "images.shape[-1] // 4 if", ARRAYS)
mutant("arrays: turned", "task", "images.permute(0, 3, 1, 2)", "images.permute(0, 3, 2, 1)", ARRAYS)
mutant("arrays: shifted in evaluation", "task", "images.shape[-1] // 8 if train else 0", "images.shape[-1] // 8", ARRAYS)
mutant("synthetic: --image-size ignored", "task", "args.image_size or side, args.image_size or side)", "side, side)",
       "test_synthetic_images_cost_nothing_and_have_the_size_that_was_asked_for")
CONSTANTS, NORMALISED = "test_constants_of_every_data_set", "test_network_sees_each_channel_normalised_in_its_precision"
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
       "test_logits_of_resnet9_are_an_eighth_of_its_head")
mutant("task: top-3 as top5", "task",
       "outputs.topk(min(5, outputs.shape[1]), dim=1)",
       "outputs.topk(min(3, outputs.shape[1]), dim=1)",
       "test_metrics_of_the_default_task")
mutant("task: fewer than five classes", "task",
       "outputs.topk(min(5, outputs.shape[1]), dim=1)",
       "outputs.topk(5, dim=1)",
       "test_fewer_than_five_classes_are_all_among_the_best_five")
mutant("task: note for photographs too", "task",
       "(args.image_size or side) < 64",
       "(args.image_size or side) < 640",
       "test_small_images_are_told_of_a_coarse_stem")
mutant("task: googlenet with two outputs", "task",
       '"aux_logits": False,',
       '"aux_logits": True,',
       "test_models_of_torchvision_have_one_output_and_the_classes_of_the_data")
mutant("task: digits not stretched", "task",
       ".unsqueeze(1) * 15",
       ".unsqueeze(1) * 16",
       "test_constants_of_every_data_set", "test_default_task_augments_by_the_seed_and_only_in_training")
mutant("task: digits not shifted", "task",
       "labels[:1437], shift=1)",
       "labels[:1437], shift=0)",
       "test_digits_are_shifted_by_one_pixel_in_training")
mutant("loader: workers print stacks too", "sampling", "signal.SIGUSR1, signal.SIGUSR2):", "signal.SIGUSR1):",
       "test_sigusr2_shows_the_stacks_of_a_rank_and_lets_it_train_on")
mutant("model: one channel for three", "task", "    if channels != 3:\n", "    if False:\n",
       "test_bad_input_is_refused_by_name[single-1 --model resnet18]")
mutant("loader: as many workers as threads", "sampling", "min(8, own_cores())", "min(8, torch.get_num_threads())",
       "test_loader_has_a_worker_for_each_core_and_pins")
mutant("sampler: empty slices", "sampling", "if batch_size < least:", "if False:", "test_sampler_refuses_a_batch_that_leaves_a_rank_without_samples")

# What accelerators would meet
mutant("seeds: an accelerator that nobody uses", "sampling", 'getattr(accelerator, "is_initialized", lambda: True)()', "True",
       "test_accelerator_that_is_not_used_is_not_seeded")
POOLS = "test_pools_of_the_models_are_those_of_adaptive_max_pool2d"
mutant("resnet9: --deterministic refuses its pool", "task", "F.max_pool2d(features, features.shape[-2:])",
       "F.adaptive_max_pool2d(features, 1)", POOLS)
mutant("digitnet: no image of two pixels", "task", "[max(2, side) for side", "[side for side", POOLS)
mutant("digitnet: the middle row is left out", "task", "[(n + 1) // 2 for n in sides]", "[n // 2 for n in sides]", POOLS)
