"""Mutants of a run and its files."""

from mutants_base import BITWISE, DIVERGED, NAN, ORDERED, TOLD, WINNER, WINS, mutant

# One fault takes two or three lines here, and not seven.
# fmt: off

# ------------------------------------------------------------------------------------------------------------------------- machinery/run.py

mutant("save: --save-every ignored", "machinery/run", "saves = not ends and (due or self.stopping)", "saves = not ends and self.stopping",
       "test_save_every_saves_within_the_epoch")
mutant("save: best.pt is the last", "machinery/run", "return gain > 1e-12 * abs(best)", "return True",
       "test_best_is_not_the_last")
mutant("save: best.pt is the worst", "machinery/run", "return gain > 1e-12", "return gain < 1e-12",
       "test_best_and_kept_checkpoints")
RESTORE = 'for name in ("scheduler", "scaler"):\n            getattr'
mutant("resume: optimizer not restored", "machinery/state", 'self.optimizer.load_state_dict(checkpoint["optimizer"] | {"state": saved})', "pass", "test_numbers_in_the_state_of_an_optimizer_keep_their_type")
mutant("resume: nothing of the optimizer", "machinery/state", 'self.optimizer.load_state_dict(checkpoint["optimizer"] | {"state": saved})', "numbers = []", f"{BITWISE}[single-1-9]")
mutant("resume: scheduler not restored", "machinery/state", RESTORE, RESTORE.replace('"scheduler", "scaler"', '"scaler",'),
       "test_pitfall_23_learning_rate_goes_on_at_resume")
mutant("resume: scaler not restored", "machinery/state", RESTORE, RESTORE.replace('"scheduler", "scaler"', '"scheduler",'),
       "test_loss_scale_of_fp16_goes_on_at_resume")
mutant("resume: average not restored", "machinery/state", "self.average.load_state_dict(", "dict(", f"{BITWISE}[single-1-9]")
mutant("resume: learning rate of the shorter run", "machinery/state", 'group["lr"] = peak * factor(self.global_step)', "pass",
       "test_more_epochs_follow_the_longer_schedule_from_the_first_step")
mutant("resume: each rank for itself", "machinery/run", "result, error = broadcast_object((result, error))", "pass",
       "test_pitfall_31_rank_0_reads_and_decides")
mutant("resume: sums of the log forgotten", "machinery/run", 'self.meter.restore(checkpoint["log"])', "pass", f"{BITWISE}[single-1-9]")
mutant("average: never evaluated", "machinery/run", "if not state.average.n_averaged:", "if True:",
       "test_ema_and_swa_are_what_they_say")
mutant("log: skipped steps counted twice", "machinery/log", "        state.scaler.skipped.zero_()\n", "", f"{NAN}[ddp-2]")
mutant("log: loss of the whole run", "machinery/log", "        self.meter.clear()\n", "",
       "test_logged_loss_is_that_since_the_last_line")
mutant("divergence: never ends", "machinery/run", "self.state.scaler.in_a_row >= MAX_SKIPPED_IN_A_ROW", "False", DIVERGED)
mutant("divergence: another exit code", "machinery/run", 'raise Stopped(3, f"diverged', 'raise Stopped(1, f"diverged', DIVERGED)
mutant("stop: every rank by itself", "machinery/run", "flag = int(read[1]) if read else 0", "pass", "test_pitfall_11_sigterm_saves[0]")
mutant("stop: only if all ranks were told", "machinery/run", "dist.ReduceOp.MAX, async_op", "dist.ReduceOp.MIN, async_op",
       "test_pitfall_11_sigterm_saves[0]")
mutant("stop: signals of the ranks added", "machinery/run", "dist.ReduceOp.MAX, async_op", "dist.ReduceOp.SUM, async_op",
       "test_signal_to_all_ranks_is_one_signal")
mutant("stop: without saving", "machinery/run", "if self.files:\n            checkpoint |=", "if self.files and not self.stopping:\n            checkpoint |=", f"{BITWISE}[single-1-9]")
mutant("launch: rank 0 of each machine writes", "machinery/run", "self._on_rank0(lambda: self._open(built))",
       'self._open(built) if __import__("os").environ.get("LOCAL_RANK", "0") == "0" else None',
       "test_pitfall_32_one_rank_of_all_machines_saves")
mutant("launch: ranks without a launcher do not save", "machinery/run", "end_with_parent(signal.SIGTERM)", "pass",
       "test_pitfall_39_nothing_outlives_torchrun")
mutant("divergence: not seen at the end", "machinery/run",
       "if logs or saves:", "if (logs and not ends) or saves:", DIVERGED)
mutant("resume: a model that does not fit is a traceback", "machinery/run",
       "except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:", "except ZeroDivisionError as error:",
       "test_checkpoint_of_other_data_or_another_model_is_refused")
mutant("save: whatever a task puts into its arguments", "machinery/options", "for name, value in vars(args).items() if name in names}",
       "for name, value in vars(args).items()}", "test_what_a_task_puts_into_its_arguments_does_not_spoil_the_checkpoint")
mutant("swa: statistics not estimated", "machinery/run",
       'if self.args.average == "swa" and state.step == self.sampler.steps_per_epoch:', "if False:",
       "test_swa_statistics_are_those_that_torch_estimates")
mutant("swa: statistics of the next epoch", "machinery/run", "set_position(self.state.epoch, 0)",
       "set_position(self.state.epoch + 1, 0)",
       "test_swa_statistics_are_those_that_torch_estimates")
mutant("swa: every rank evaluates its own statistics", "machinery/run",
       "        common.sync_buffers(state.average.module)\n", "",
       "test_buffers_of_an_average_are_evaluated_alike_by_eval_only[ddp]")
mutant("swa: seeded by whoever loads", "machinery/run",
       "seed_rng(self.args.seed, self.state.global_step + step, i, get_rank())", "pass",
       "test_swa_statistics_behind_dropout_do_not_depend_on_who_loads[single-1-1]")
mutant("swa: statistics in the middle of an epoch", "machinery/run",
       'self.args.average == "swa" and state.step == self.sampler.steps_per_epoch:',
       'self.args.average == "swa":', "test_interrupted_swa_goes_on_bitwise")
mutant("nodes: ranks are not compared", "machinery/run",
       "        check_agreement(args, sampler.length, val_set, device)\n", "", f"{TOLD}[seed]")
mutant("nodes: evaluation sets are not compared", "machinery/check",
       "    n = len(val_set)\n", "    n, val_set = 1, [(torch.ones(1), torch.ones(1))]\n",
       f"{TOLD}[evaluation set]")
mutant("nodes: orders of evaluation sets are not compared", "machinery/check",
       '    must_agree |= {"the hash of some evaluation samples": some}\n', "", f"{TOLD}[order]")
mutant("nodes: code is not compared", "machinery/check", "path.read_bytes() for path in files",
       'b"" for path in files', f"{TOLD}[code]")
mutant("nodes: only one rank finds the difference", "machinery/check", 'raise error_on_all(f"{name} is',
       'if dist.get_rank() > 0:\n                return\n            raise error_on_all(f"{name} is',
       f"{TOLD}[seed]")
mutant("stop: ranks that do not save say that it was saved", "machinery/run",
       "if broadcast_object(self.refused):", "if self.refused:",
       "test_stop_that_was_not_saved_is_not_called_saved_on_any_node")
mutant("nodes: what a task put into args is compared", "machinery/check", "in declared(args).items() if name not in per_node}", "in vars(args).items() if name not in per_node}",
       "test_what_belongs_to_a_node_may_differ")
mutant("nodes: options of a task are not compared", "machinery/check", "per_node = keys(PER_NODE)", "per_node = keys(PER_NODE) | {*args.task_options}",
       "test_options_of_a_task_must_be_the_same_on_all_nodes")
mutant("save: a run that could not be saved ends well", "machinery/run",
       "        if refused:\n            raise", "        if False:\n            raise",
       "test_what_became_non_finite_is_never_saved_and_the_run_does_not_end_well[single-1]")
mutant("save: a run that could not be saved is a failure, which is started again", "machinery/run",
       'raise Stopped(3, f"the run is done', 'raise Stopped(1, f"the run is done',
       "test_run_whose_last_state_was_not_saved_is_no_success")
mutant("save: the other ranks end well", "machinery/run",
       "refused = broadcast_object(self.refused)\n        if self",
       "refused = self.refused\n        if self",
       "test_ranks_of_a_run_that_could_not_be_saved_end_alike")
mutant("save: a refused score is the best", "machinery/run", "state.best = best_before", "pass",
       "test_refused_save_does_not_raise_the_best_score")
MORE_EPOCHS = "test_swa_with_more_epochs_averages_what_a_run_of_that_length_averages"
mutant("swa: an average that begins too early is kept", "machinery/run",
       "state.average.n_averaged.zero_()", "pass", f"{MORE_EPOCHS}[4-12]")
mutant("stop: forgotten after an evaluation", "machinery/run",
       "self.stop.agreed(wait=True) if state.epoch < args.epochs else None", "None",
       "test_signal_during_an_evaluation_finds_the_run_saved_and_stops_it_after_the_evaluation[single-1]")
mutant("stop: after an evaluation only what was agreed before", "machinery/run", "read = self.pending if wait else before", "read = before",
       "test_signal_during_an_evaluation_finds_the_run_saved_and_stops_it_after_the_evaluation[ddp-2]")
mutant("stop: a run that is done is called stopped", "machinery/run",
       "self.stop.agreed(wait=True) if state.epoch < args.epochs else None",
       "self.stop.agreed(wait=True)", "test_signal_in_the_last_evaluation_lets_the_run_end")
mutant("ends: a rank leaves before the others know", "machinery/processes",
       'return Stopped(2, f"error: {message}") if dist.is_initialized() else UsageError(message)',
       "return UsageError(message)", "test_early_end_of_all_ranks_waits_for_all")
mutant("stop: SLURM's warning ends well although nothing was saved", "machinery/run",
       "raise Stopped(3, f\"stopped by", "raise Stopped(SIGNALS[self.stopping], f\"stopped by",
       "test_warning_of_slurm_ends_with_3_if_the_run_could_not_be_saved")
SPEED = "test_speed_is_the_samples_since_the_last_line_over_the_seconds_since"
RESUMED_SPEED = "test_first_line_after_a_resume"
WAIT = "test_data_wait_is_the_share_of_the_time_before_the_batches"
mutant("speed: in images a millisecond", "machinery/log", "self.samples_before) / (now - self.began)", "self.samples_before) / ((now - self.began) * 1000)", SPEED)
mutant("speed: since the start of the epoch", "machinery/log", "self.began, self.waited, self.samples_before = now, 0.0, 0", "self.waited, self.samples_before = 0.0, 0", SPEED)
mutant("speed: with what an earlier process trained on", "machinery/log", "(means[\"count\"] - self.samples_before)", "means[\"count\"]", RESUMED_SPEED)
mutant("speed: what an earlier process trained on is missing in each line", "machinery/log", "self.began, self.waited, self.samples_before = now, 0.0, 0",
       "self.began, self.waited = now, 0.0", RESUMED_SPEED)
mutant("speed: with the evaluation", "machinery/log", "asked = self.began = time.perf_counter()",
       "asked = self.began = self.began or time.perf_counter()", SPEED)
mutant("data_wait: since the start of the epoch", "machinery/log", "self.began, self.waited, self.samples_before = now, 0.0, 0", "self.began, self.samples_before = now, 0", WAIT)
mutant("data_wait: with the steps", "machinery/log", "            asked = time.perf_counter()\n", "", WAIT)
RANKS_SPEED = "test_speed_and_loss_are_those_of_all_ranks"
mutant("speed: of one rank", "machinery/log", '(means["count"] - self', "(self.meter.count - self", RANKS_SPEED)
mutant("log: epochs from 1", "machinery/log", '"epoch": state.epoch,\n', '"epoch": state.epoch + 1,\n', SPEED)
mutant("log: step of the run for that of the epoch", "machinery/log", '"step": state.step,\n', '"step": state.global_step,\n', SPEED)
mutant("log: steps of an epoch are counted for --log-every", "machinery/run", "logs = ends or state.global_step % args.log_every == 0",
       "logs = ends or state.step % args.log_every == 0", SPEED)
mutant("log: an epoch's last step is not logged", "machinery/run", "logs = ends or state.global_step % args.log_every == 0",
       "logs = state.global_step % args.log_every == 0", SPEED)
mutant("log: learning rate of the next step", "machinery/log", '"lr": self.lr,', '"lr": state.optimizer.param_groups[0]["lr"],',
       "test_learning_rate_and_norm_of_a_line_are_those_of_its_step")
mutant("log: norm rounded to float32", "machinery/log", '"grad_norm": grad_norm.item()', '"grad_norm": grad_norm.float().item()',
       "test_learning_rate_and_norm_of_a_line_are_those_of_its_step")
PRINTED = "test_printed_line_is_what_was_logged"
mutant("print: epochs from 0", "machinery/log", "f\"epoch {line['epoch'] + 1}/", "f\"epoch {line['epoch']}/", PRINTED)
mutant("print: step of the run for that of the epoch", "machinery/log", "step {state.step}/{self.sampler.steps_per_epoch}  ",
       "step {state.global_step}/{self.sampler.steps_per_epoch}  ", PRINTED)
mutant("print: samples for images/s", "machinery/log", "{line['images_per_s']:.0f} images/s", "{means['count']:.0f} images/s", PRINTED)
mutant("print: skipped in a row for skipped", "machinery/log", "skipped {skipped} steps", "skipped {state.scaler.in_a_row:.0f} steps", PRINTED)
mutant("print: four digits of the loss", "machinery/log", "{name} {mean:.6f}", "{name} {mean:.4f}", PRINTED)
mutant("print: evaluation with the count twice", "machinery/log", 'for name, value in metrics.items() if name != "count"]',
       "for name, value in metrics.items()]", "test_evaluation_is_printed_and_logged")
mutant("print: a resumed run names the epoch before", "machinery/run", 'f"at epoch {state.epoch + 1}, step', 'f"at epoch {state.epoch}, step',
       "test_resumed_run_says_where_it_goes_on")
mutant("print: a finished run goes on", "machinery/run", "if state.epoch >= epochs:", "if state.epoch > epochs:",
       "test_resumed_run_says_where_it_goes_on")
BAR = "test_progress_bar_shows_the_position_and_the_figures"
mutant("bar: starts at 0 after a resume", "machinery/log", "initial=self.state.step, ", "", BAR)
mutant("bar: names the epoch before", "machinery/log", 'f"epoch {self.state.epoch + 1}/{self.args.epochs}"',
       'f"epoch {self.state.epoch}/{self.args.epochs}"', BAR)
mutant("bar: does not move", "machinery/run", "        self.log.bar.update()\n", "        self.log.bar.update(0)\n", BAR)
mutant("bar: stays open", "machinery/log", "asked = time.perf_counter()\n        self.bar.close()\n", "asked = time.perf_counter()\n", BAR)
mutant("bar: position twice", "machinery/log", 'text.partition("  ")[2]',
       "text", BAR)
ALL = 'self.save(*names, "last.pt")'
mutant("save: last.pt before best.pt", "machinery/run", ALL, 'self.save("last.pt", *names)', ORDERED)
mutant("save: last.pt before the kept one", "machinery/run", ALL, 'self.save(*names[:1], "last.pt", *names[1:])', ORDERED)
mutant("save: --keep-every one epoch late", "machinery/run", "state.epoch % args.keep_every == 0", "state.epoch % args.keep_every == 1",
       "test_kept_epochs_are_every_so_many")
mutant("save: kept under the number of the epoch before", "machinery/run", 'f"epoch-{state.epoch:04}.pt"', 'f"epoch-{state.epoch - 1:04}.pt"',
       "test_kept_epochs_are_every_so_many")
TIES = "test_the_first_of_equal_scores_stays_the_best"
mutant("best: the last of equal scores", "machinery/run", "return gain > 1e-12", "return gain >= 1e-12", TIES)
mutant("best: infinity", "machinery/run", "return math.isfinite(score)", "return not math.isnan(score)", TIES)
mutant("best: a rise by rounding", "machinery/run", "1e-12 * abs(best)", "0", TIES)
mutant("best: a rise that counts is rounding", "machinery/run", "1e-12 * abs(best)", "1e-6 * abs(best)", TIES)
mutant("best: no score above a negative one", "machinery/run", "1e-12 * abs(best)", "1e-12 * best", TIES)
mutant("best: zero is no score", "machinery/run", "if best is None or not", "if not best or not", TIES)
mutant("best: by the loss", "machinery/run", 'known = [name for name in metrics if name not in ("loss", "count")] + ["loss"]', "known = [*metrics]", "test_first_metric_that_is_no_loss_decides")
mutant("best: forgotten at resume", "machinery/state", 'for name in ("epoch", "step", "global_step", "best"):\n            setattr',
       'for name in ("epoch", "step", "global_step"):\n            setattr', "test_tie_is_kept_across_a_resume")
EVAL_ONLY = "test_eval_only_names_the_epoch_whose_weights_it_sees"
mutant("eval-only: the epoch after", "machinery/log", "epoch -= 1  # the checkpoint counts the epoch as done", "pass", EVAL_ONLY)
mutant("eval-only: the epoch before the first", "machinery/log", "self.state.step == 0 and epoch > 0", "self.state.step == 0", EVAL_ONLY)
mutant("eval-only: the epoch before that of a step", "machinery/log", "self.state.step == 0 and epoch > 0", "0 < epoch", EVAL_ONLY)
REMEMBER = "received.append(list(SIGNALS).index(number) + 1)"
mutant("signals: the last one wins", "machinery/run", REMEMBER, "received[:] = [list(SIGNALS).index(number) + 1]", WINS)
mutant("signals: the first one wins", "machinery/run", REMEMBER, "received[:] = received or [list(SIGNALS).index(number) + 1]", WINS)
mutant("signals: the weaker one wins", "machinery/run", REMEMBER,
       "received[:] = [min([*received, list(SIGNALS).index(number) + 1])]", WINS)
THREAD_OF_GLOO = "test_no_thread_of_gloo_outlives_the_process_group"
mutant("end: a handler keeps gloo's threads", "machinery/run", "received.append(list", "self, received.append(list",
       f"{THREAD_OF_GLOO}[train_ddp]")
mutant("end: a module keeps gloo's threads", "common", "import torch.distributed.nn.functional\n", "", f"{THREAD_OF_GLOO}[other_project]")
mutant("end: a module keeps gloo's threads in the minimal script", "examples/minimal_ddp",
       "import torch.distributed.nn.functional  #", "#", f"{THREAD_OF_GLOO}[minimal_ddp]")
mutant("signals: the weaker one of the ranks wins", "machinery/run", "return list(SIGNALS)[flag - 1]", "return list(SIGNALS)[-flag]", WINNER)
mutant("signals: ranks wait in every step", "machinery/run", "read = self.pending if wait else before", "read = self.pending", WINNER)
mutant("stop: names another signal", "machinery/run", 'f"stopped by {name} after', 'f"stopped by {list(SIGNALS)[0].name} after',
       "test_stop_says_what_it_saved_and_ends_with_its_code")
mutant("stop: what was not saved was saved", "machinery/run", "if broadcast_object(self.refused):", 'if broadcast_object(""):',
       "test_stop_that_could_not_be_saved_says_so")
mutant("resume: fused of the other device", "machinery/state",
       "group[name] = now[name]",
       "pass",
       "test_optimizer_that_was_not_fused_goes_on_here")
mutant("resume: the loop over tensors of shards", "machinery/state", '{"fused", "foreach"}', '{"fused"}',
       "test_optimizer_that_was_not_fused_goes_on_here")

# ----------------------------------------------------------------------------------------------------------------------- machinery/files.py

mutant("save: NaN is written", "machinery/files", "        if bad:", "        if False:", "test_non_finite_parameters_never_reach_a_file")
mutant("save: NaN in the average is written", "machinery/files", ', *checkpoint["average"].items()]', "]",
       "test_non_finite_average_never_reaches_a_file")
mutant("resume: changed options not noticed", "machinery/files", '    check_config(args, config, path)', "    pass",
       "test_changed_option_that_would_change_the_run_is_refused_by_name[--seed 1]")
mutant("resume: a task may not move", "machinery/files", "then, now = Path(then).name, Path(now).name", "pass",
       "test_task_may_move_to_another_folder")
mutant("log: not cut back", "machinery/files", "self.log.truncate(self._bytes_before(checkpoint))", "pass",
       "test_log_is_cut_back_to_the_checkpoint_even_if_its_last_line_is_torn")
mutant("log: evaluation after the checkpoint kept", "machinery/files", 'entry["epoch"] < checkpoint["epoch"]',
       'entry["epoch"] <= checkpoint["epoch"]', "test_evaluation_after_the_checkpoint_is_logged_once")
mutant("log: --eval-only cuts it", "machinery/run", "if not self.args.eval_only:\n            self._on_rank0",
       "if True:\n            self._on_rank0",
       "test_eval_only_does_not_touch_the_log_of_a_run")
mutant("lock: none", "machinery/files", "fcntl.flock(self.log, fcntl.LOCK_EX | fcntl.LOCK_NB)", "pass", "test_pitfall_31_rank_0_reads_and_decides")
mutant("resume: from an older checkpoint leaves the newer last.pt", "machinery/files", 'self.path.resolve() != last', "None is last",
       "test_going_back_to_an_older_checkpoint_is_going_back")
LOCK = """        try:
            if not only_reads:
                fcntl.flock(self.log, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            problem = "another run is writing there; choose another directory"
            raise UsageError(f"--output-dir {directory}: {problem}") from error
"""
FIND = "        path, self.checkpoint = find_checkpoint(args, samples)\n"
mutant("resume: the checkpoint is read before the lock", "machinery/files", LOCK + FIND, FIND + LOCK,
       "test_run_that_ended_while_this_one_was_starting_is_not_overwritten")
mutant("lock: an evaluation needs it", "machinery/files", "            if not only_reads:\n", "            if True:\n",
       "test_eval_only_does_not_touch_the_log_of_a_run")
mutant("resume: auto overwrites a run of which only the best is left", "machinery/files",
       "elif others:", "elif False:",
       "test_auto_does_not_start_over_a_run_of_which_only_the_best_is_left")
mutant("resume: another training set not noticed", "machinery/files", "if before != samples:",
       "if False:", "test_checkpoint_of_other_data_or_another_model_is_refused")
mutant("log: a foreign line ends the run", "machinery/files", "except (ValueError, KeyError, TypeError):", "except ValueError:",
       "test_line_of_another_program_in_the_log_is_cut_off")
mutant("restart: begins anew", "machinery/files", 'args.resume == "auto" or restarted:',
       'args.resume == "auto":', "test_restarted_process_goes_on_or_begins_anew")
mutant("restart: from --resume FILE again", "machinery/files", 'args.resume == "auto" or restarted:',
       'args.resume == "auto" or (restarted and not args.resume):', "test_restarted_process_goes_on_or_begins_anew")
mutant("restart: in another directory than the first attempt", "machinery/files", "if restarted and not args.output_dir and", "if False and",
       "test_restarted_process_goes_on_or_begins_anew")
mutant("eval-only: of nothing", "machinery/files", "refuse(nothing,", "refuse(False,",
       "test_eval_only_evaluates_what_was_trained_or_says_why_not")
mutant("tensorboard: left open", "machinery/files", "            self.tensorboard.close()\n", "            pass\n",
       "test_tensorboard_shows_what_the_log_says[single-1]")
mutant("by design: taken from the end of the run", "machinery/files",
       "became_non_finite(v, self.by_design.get(name))", "became_non_finite(v, v)",
       "test_what_became_non_finite_is_never_saved_and_the_run_does_not_end_well[single-1]")
mutant("swa: averages that are lost are not missed", "machinery/files", "if len(wanted) in (0, found):",
       "if True:", "test_swa_refuses_epochs_whose_average_is_lost")
mutant("swa: names an epoch too low", "machinery/files", "if not due(epochs))", "if not due(epochs)) - 1", "test_swa_refuses_epochs_whose_average_is_lost")
mutant("eval-only: writes into the log of a run", "machinery/files",
       'only_reads = args.eval_only and any(directory.glob("*.pt"))', "only_reads = False",
       "test_eval_only_does_not_touch_the_log_of_a_run")
mutant("eval-only: never writes a line", "machinery/files",
       'only_reads = args.eval_only and any(directory.glob("*.pt"))', "only_reads = args.eval_only",
       "test_eval_only_does_not_touch_the_log_of_a_run")
mutant("resume: best.pt stays behind", "machinery/files",
       'save_checkpoint(found, self.directory / "best.pt")', "str()",
       "test_resume_in_another_folder_takes_best_along")
mutant("resume: any best.pt will do", "machinery/files", 'if found["best"] == best:',
       'if found["best"] is not None:',
       "test_resume_of_an_earlier_checkpoint_does_not_take_a_later_best")
mutant("resume: a best score without its file", "machinery/files", 'checkpoint["best"] = None  # the', 'str()  # the',
       "test_best_pt_that_was_deleted_is_written_anew")
mutant("resume: a best.pt that is gone ends the run", "machinery/files", "contextlib.suppress(UsageError)", "contextlib.suppress(KeyError)",
       "test_best_pt_that_was_deleted_is_written_anew")
mutant("traces: the lock stays", "machinery/files",
       "        at_end.callback(lambda: log() and log().close())\n", "",
       "test_main_can_go_on_where_a_stop_ended_it")
mutant("resume: last.pt before best.pt", "machinery/files",
       "if best is not None and not args.eval_only and not", "if False and not",
       "test_best_is_in_the_new_folder_before_last")
mutant("log: infinity is written", "machinery/files", "isinstance(v, float) and not math.isfinite(v)",
       "isinstance(v, float) and math.isnan(v)", "test_what_json_cannot_say_is_null")
SCALARS = "test_tensorboard_gets_the_figures_of_the_log"
mutant("tensorboard: counts are curves", "machinery/files", '"step", "global_step", "count"}', '"step", "global_step"}', SCALARS)
mutant("tensorboard: over the epoch", "machinery/files", "line[name], line[\"global_step\"])", 'line[name], line["epoch"])', SCALARS)
mutant("save: in the opposite order", "machinery/files", "/ name for name in names)", "/ name for name in names[::-1])", ORDERED)
LOGGED = "test_log_is_on_the_disk_before_a_checkpoint_is_begun"
FSYNC = "        os.fsync(self.log.fileno())  # a checkpoint must not be ahead of the log\n"
mutant("save: the log stays in memory", "machinery/files", FSYNC, "", LOGGED)
WRITE = "        save_checkpoint(checkpoint, *(self.directory / name for name in names))\n"
mutant("save: the log after the checkpoint", "machinery/files", FSYNC + WRITE, WRITE + FSYNC, LOGGED)
mutant("log: lines stay in Python's memory", "machinery/files", "        self.log.flush()\n", "", LOGGED)
mutant("tensorboard: resumed without purging", "machinery/files",
       'purge = self.checkpoint["global_step"] + 1 if self.checkpoint else None',
       "purge = None",
       "test_tensorboard_goes_on_after_the_step_of_the_checkpoint")
mutant("tensorboard: purges its last step", "machinery/files",
       'purge = self.checkpoint["global_step"] + 1 if',
       'purge = self.checkpoint["global_step"] if',
       "test_tensorboard_goes_on_after_the_step_of_the_checkpoint")
mutant("log: the line of the checkpoint's own step is cut off", "machinery/files",
       'entry["global_step"] <= checkpoint["global_step"]',
       'entry["global_step"] < checkpoint["global_step"]',
       "test_log_is_cut_back_to_the_checkpoint_even_if_its_last_line_is_torn")
mutant("log: a torn last line is kept", "machinery/files",
       'if not done or not line.endswith("\\n"):',
       "if not done:",
       "test_log_stays_whole_lines_after_a_resume")
mutant("log: length in characters", "machinery/files",
       "kept += len(line.encode())",
       "kept += len(line)",
       "test_log_stays_whole_lines_after_a_resume")
mutant("save: the last names of what is not finite", "machinery/files",
       "bad[:5]",
       "bad[-5:]",
       "test_five_names_are_enough")
mutant("folder: without the process", "machinery/files",
       "{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}",
       "{time.strftime('%Y%m%d-%H%M%S')}",
       "test_folder_of_a_run_without_a_name")
mutant("folder: without the model", "machinery/files",
       'f"{args.dataset}-{args.model}" if args',
       'f"{args.dataset}" if args',
       "test_folder_of_a_run_without_a_name")
mutant("resume: a checkpoint that does not fit takes the place of last.pt", "machinery/run",
       "            state.restore(checkpoint)\n",
       "            self._on_rank0(lambda: self.files.rewind())\n            state.restore(checkpoint)\n",
       "test_checkpoint_that_does_not_fit_leaves_the_files_as_they_were")
mutant("load: parts may be missing", "common", "if missing :=", "if missing := \"\" and", "test_checkpoint_lacks_nothing")
mutant("restart: an evaluation takes last.pt", "machinery/files", "attempt() > 0 and not args.eval_only", "attempt() > 0",
       "test_restarted_process_goes_on_or_begins_anew")
mutant("folder: a task of one's own is called digits", "machinery/files", 'if args.task == TASK else Path(args.task).stem', "",
       "test_folder_of_a_run_without_a_name")
mutant("resume: every optimizer can be fused", "machinery/state", '{"fused", "foreach"} & now.keys()', '{"fused", "foreach"}',
       "test_state_of_an_optimizer_that_cannot_be_fused_is_restored")
mutant("best: highest loss", "machinery/run", 'lower_is_better=name == "loss"', "lower_is_better=False", "test_lowest_loss_or_a_named_metric_decides")
mutant("best: the first metric whatever is asked", "machinery/run", 'name = args.best or known[0]', "name = known[0]",
       "test_lowest_loss_or_a_named_metric_decides")
mutant("best: an unknown metric", "machinery/check",  "unknown = args.best not in (None, *meter.sums)", "unknown = False",
       "test_metric_that_the_task_does_not_have_is_refused")
mutant("eval-only: weights from elsewhere refused", "machinery/files", "nothing = args.eval_only and args.resume", "nothing = args.eval_only",
       "test_weights_from_elsewhere_are_evaluated_without_a_checkpoint[single-1]")
mutant("eval-only: needs a checkpoint", "machinery/options", "args.eval_only and not args.resume and not args.weights", "args.eval_only and not args.resume",
       "test_weights_from_elsewhere_are_evaluated_without_a_checkpoint[single-1]")
mutant("save: no names of classes", "machinery/run", ', "classes": self.classes}', '}', "test_checkpoint_names_the_classes")
HEADER = "test_header_says_what_runs_where"
mutant("header: a share without the micro-batches", "machinery/log", "math.ceil(args.batch_size / args.accum_steps) / devices", "args.batch_size / devices", HEADER)
mutant("header: replicas are not counted", "machinery/log", 'devices = common.get_world_size() * getattr(args, "replicas", 1)', "devices = common.get_world_size()", f"{HEADER}[dp-2-2-16]")
mutant("header: in every epoch", "machinery/log", "if not self.bar:", "if True:", PRINTED)
mutant("swa: epochs that are lost are averaged again", "machinery/files", "for epoch in swa_epochs(**schedule) if epoch <= done]", "for epoch in swa_epochs(**schedule)]", "test_swa_refuses_epochs_whose_average_is_lost",
       "test_swa_with_more_epochs_averages_what_a_run_of_that_length_averages")
mutant("save: what followed the first error is shown", "common", "first if isinstance(first, OSError) else error", "error",
       "test_full_disk_in_the_middle_of_a_save_leaves_the_old_file_and_no_other")
SHARDED = "test_shards_equal_one_device"
mutant("shards: not put together in a file", "machinery/state", 'value = joined(value) if hasattr(value, "full_tensor") else value', 'value = value.to_local() if hasattr(value, "full_tensor") else value',
       "test_file_of_shards_holds_whole_plain_tensors")
SHARDS = "test_pitfall_44_a_shard_saved_as_the_whole"
ANY_CUT = "test_tensors_that_are_cut_in_any_way_are_joined"
mutant("shards: each cut is one of rows", "machinery/state", "if not (last.is_shard(0) and all(place.is_replicate() for place in copies)):", "if False:", f"{ANY_CUT}[3]")
mutant("shards: rows of rows are the whole", "machinery/state", "last.is_shard(0) and all(place.is_replicate() for place in copies)", "last.is_shard(0)", f"{ANY_CUT}[6]")
mutant("eval-only: nothing is left to do", "machinery/run", "if self.args.eval_only and state.step == 0:", "if False:", "test_eval_only_says_what_it_evaluates")
mutant("stop: behind the progress bar", "machinery/run", "            if self.log.bar:\n                self.log.bar.close()\n", "", "test_stop_says_what_it_saved_and_ends_with_its_code")
mutant("shards: the rest of an unequal cut is lost", "machinery/state", "math.ceil(len(shards) / ranks)", "len(shards) // ranks", SHARDS)
mutant("shards: their padding in the middle", "machinery/state", "padded[: len(own)] = own", "padded[rows - len(own) :] = own", SHARDS)
mutant("shards: collected among all ranks", "machinery/state", "shards.device_mesh.get_group(-1)", "None", "test_ranks_of_one_row_share_a_copy")
END = "test_end_says_what_is_best_and_how_to_go_on"
mutant("end: nothing is said", "machinery/run", "if self.files and state.epoch == args.epochs and state.best is not None:", "if False:", END)
mutant("end: said without a best", "machinery/run", "state.epoch == args.epochs and state.best is not None:", "state.epoch == args.epochs:", END)
mutant("end: said after each epoch", "machinery/run", "if self.files and state.epoch == args.epochs and", "if self.files and", END)
mutant("end: another score", "machinery/run", '            self._print_best(name)\n', '            state.best = metrics[name]\n            self._print_best(name)\n', END)
mutant("end: the epoch of best.pt is forgotten at a resume", "machinery/files", '                    self.best_epoch = found["epoch"]\n', "", END)
mutant("end: the last epoch", "machinery/files", 'if "best.pt" in names:', "if names:", END)
mutant("stop: does not say how to go on", "machinery/run", 'print(f"to go on: ', 'str(f"to go on: ',
       "test_stop_says_what_it_saved_and_ends_with_its_code")
mutant("shards: optimizer state is not cut", "machinery/state", "saved[i] = cut_like(saved[i], dict.fromkeys(saved[i], parameters[i]))", "pass", "test_run_that_changes_its_mode_at_each_stop_is_the_same_run")
mutant("shards: the average is not cut", "machinery/state", 'self.average.load_state_dict(cut_like(checkpoint["average"], own))', 'self.average.load_state_dict(checkpoint["average"])',
       "test_resumed_run_of_shards_is_bitwise_the_uninterrupted_one[--average ema]")
mutant("fsdp: parts that are read without a call", "machinery/tasks", "if isinstance(module, READ_THEIR_PARTS):", "if False:",
       "test_shards_of_parts_that_are_read_without_a_call")
mutant("fsdp: lists of parameters are called", "machinery/tasks", " or only_vectors or no_forward:", " or only_vectors:",
       "test_shards_of_parts_that_are_read_without_a_call")
mutant("fsdp: a number is cut", "machinery/tasks", "if hasattr(args, \"shard_size\") and", "if False and", "test_network_that_cannot_work_is_refused")
mutant("sync-bn: takes the place of any norm", "machinery/tasks", "if args.sync_bn and own:", "if False:", "test_network_that_cannot_work_is_refused")
mutant("save: without the versions of modules", "machinery/state", "        found = copy.copy(value)\n        found.update({name: whole(item) for name, item in value.items()})", "        found = {name: whole(item) for name, item in value.items()}",
       "test_file_is_loaded_by_a_network_that_asks_for_versions")
mutant("resume: an optimizer keeps tensors alone", "machinery/state", 'saved = dict(checkpoint["optimizer"]["state"])', 'saved = {i: v for i, v in checkpoint["optimizer"]["state"].items() if type(i) is int}', "test_resumed_run_is_the_uninterrupted_one")
mutant("check: extra state is not read back", "machinery/check", "        read_back({n: v for n, v in net.state_dict().items() if not isinstance(v, torch.Tensor)})\n", "        pass\n", "test_network_that_cannot_work_is_refused")
mutant("fsdp: each micro-batch is synchronised", "train_fsdp", "model.set_requires_gradient_sync(i == args.accum_steps - 1)", "model.set_requires_gradient_sync(i == 0)", f"{SHARDED}[--accum-steps 3 --clip-grad-norm 0.05 --lr 2-3]")
mutant("fsdp: gradients not scaled", "train_fsdp", "losses.sum() * (dist.get_world_size() / args.batch_size)", "losses.sum() / args.batch_size", f"{SHARDED}[-3]")
mutant("fsdp: all ranks drop the same units", "train_fsdp", "state.global_step, i, dist.get_rank())", "state.global_step, i)", "test_ranks_of_shards_drop_other_units")
BLOCK = """    mesh = mesh_of_ranks(device, args.shard_size)
    for network in [net, *average.children()]:
        shard(network, task.shard_modules(network), mesh)
"""
BUILD = "    optimizer = task.build_optimizer(args, net)\n"
mutant("fsdp: sharded after the optimizer", "train_fsdp", BLOCK + BUILD, BUILD + BLOCK, f"{SHARDED}[-2]")
mutant("fsdp: a task is not asked", "train_fsdp", "task.shard_modules(network)", "[]", "test_task_chooses_what_is_sharded")
mutant("fsdp: the norm of a shard", "common", "nn.utils.get_total_norm(p.grad for p in parameters if", "nn.utils.get_total_norm(getattr(p.grad, '_local_tensor', p.grad) for p in parameters if", f"{SHARDED}[--accum-steps 3 --clip-grad-norm 0.05 --lr 2-3]")
mutant("fsdp: rows of another size", "machinery/sharding", "shape = (world_size // shard_size, shard_size)", "shape = (shard_size, world_size // shard_size)", "test_ranks_of_a_row_hold_the_whole")
mutant("fsdp: what shares a weight is sharded alone", "machinery/tasks", "not is_list and not shares_weight", "not is_list", "test_parts_that_are_sharded_each_for_itself")
mutant("fsdp: a list is sharded", "machinery/tasks", "not is_list and not shares_weight", "not shares_weight", "test_parts_that_are_sharded_each_for_itself")
mutant("fsdp: the lowest modules", "machinery/tasks", "fits = 8 * size <= total or not", "fits = not", "test_parts_that_are_sharded_each_for_itself")
HALF = ", mp_policy=torch.distributed.fsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32))"
mutant("fsdp: parts travel in bf16", "machinery/sharding", "reshard_after_forward=True)", "reshard_after_forward=True" + HALF,
       "test_shards_in_bf16_compute_what_ddp_computes[unused]")
mutant("fsdp: the rest travels in bf16", "machinery/sharding", "reshard_after_forward=False)", "reshard_after_forward=False" + HALF,
       "test_shards_in_bf16_compute_what_ddp_computes[layer]")
mutant("fsdp: a norm is sharded", "machinery/tasks", " or only_vectors or no_forward", " or no_forward", "test_parts_that_are_sharded_each_for_itself")
mutant("fsdp: small modules too", "machinery/tasks", "256 * size < total or", "", "test_parts_that_are_sharded_each_for_itself")
mutant("fsdp: a rank is missing in the last forward", "machinery/sharding", ".missing):", ".missing * 0):", "test_rank_with_a_batch_less_joins_the_last_forward")
mutant("fsdp: fp16", "machinery/options", 'refuse(args.amp == "fp16", ', "refuse(False, ", "test_what_torch_cannot_shard_is_refused")
mutant("fsdp: shards of unequal rows", "machinery/options", "wrong = world_size % size != 0", "wrong = False", "test_ranks_of_one_row_share_a_copy")

# What accelerators would meet
mutant("resume: strides of the checkpoint", "machinery/state", "torch.empty_like(parameter, dtype=value.dtype).copy_(value)", "value",
       "test_restored_optimizer_has_the_strides_of_the_parameters")
mutant("divergence: every step waits for the device", "machinery/run", "if logs or saves:", "if True:",
       "test_steps_between_log_lines_do_not_wait_for_the_device")
mutant("divergence: saved before it is seen", "machinery/run", "if logs or saves:", "if logs:",
       "test_steps_between_log_lines_do_not_wait_for_the_device")

SECONDS = "test_evaluation_line_has_the_seconds_of_training_evaluation_and_saving"
mutant("seconds: saving is training", "machinery/run", '        self.log.spend("save_s")\n', "", SECONDS)
mutant("seconds: saving is training before it too", "machinery/run", '        self.log.spend("train_s")\n        if self', "        if self", SECONDS)
WAIT_SAVE = "        if self.files:\n            self.files.wait()  # for the save before\n"
mutant("seconds: to wait for the save before is training", "machinery/run", f'        self.log.spend("train_s")\n{WAIT_SAVE}', f'{WAIT_SAVE}        self.log.spend("train_s")\n', SECONDS)

# Saving beside the next steps
BESIDE = "test_steps_go_on_while_the_disk_is_busy_and_the_next_save_waits"
mutant("save: the steps wait for it", "machinery/files", "pool.shutdown(wait=False)", "pool.shutdown()", BESIDE)
mutant("save: the steps wait for the log", "machinery/files", "        pool = ThreadPoolExecutor", "        os.fsync(self.log.fileno())\n        pool = ThreadPoolExecutor", BESIDE)
mutant("save: does not wait for the one before", "machinery/run", WAIT_SAVE + "        sums", "        sums", BESIDE)
mutant("save: changes with the steps that follow", "machinery/state", 'value.to("cpu", copy=True)', "value.cpu()",
       "test_steps_that_follow_do_not_change_what_is_saved")
mutant("save: an error is noticed at the next save alone", "machinery/files", "if self.writing and self.writing.done():", "if False:",
       "test_error_of_the_thread_is_raised_at[the next log line]")
mutant("save: an error is forgotten", "machinery/files", "if self.writing:\n            self.writing.result()", "if self.writing:\n            self.writing.exception()",
       "test_error_of_the_thread_is_raised_at[the next save]")
mutant("stop: says that it has saved before it has", "machinery/run", "                self.files.wait()\n                directory", "                directory",
       "test_stop_while_a_save_is_under_way_comes_after_its_own_save[15]")
mutant("end: names a best.pt that is not there yet", "machinery/run", "            self.files.wait()\n            path", "            path",
       "test_end_of_the_last_epoch_names_a_file_that_is_there")
mutant("end: while a save is under way", "machinery/files", "        self.wait()\n        if self.tensorboard", "        if self.tensorboard",
       "test_run_that_finishes_waits_for_its_last_save")
mutant("divergence: while a save is under way", "machinery/run", "            if self.files:\n                self.files.wait()\n            problem", "            problem",
       "test_run_that_diverged_waits_for_its_last_save")
mutant("seconds: evaluation is training", "machinery/log", '        self.spend("eval_s")\n', '        self.spend("train_s")\n', SECONDS)
mutant("seconds: training is evaluation", "machinery/run", '        self.log.spend("train_s")\n        state = self.state', "        state = self.state", SECONDS)
mutant("seconds: of the whole run", "machinery/log", "        line |= self.spent\n        self.start_times()\n", "        line |= self.spent\n", SECONDS)
mutant("seconds: counted twice", "machinery/log", "        self.mark = now\n", "", SECONDS)
mutant("seconds: not in the log", "machinery/log", "        line |= self.spent\n", "", SECONDS)
