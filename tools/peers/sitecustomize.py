"""Time the optimizer's steps of any program from outside; it needs to know nothing of this.

Python imports a module of this name when it starts, if its directory is on PYTHONPATH, where
tools/peers.py puts it. STEPS_WANTED: end every rank after so many steps. STEPS_FILE: rank 0
writes there when each of them ended, one time.monotonic() a line.
"""

import os
import sys
import time
from importlib.machinery import PathFinder


class Watch:
    """Finds torch.optim.optimizer when a program imports torch, and puts a hook on all steps."""

    def find_spec(self, name, path, target=None):
        if name != "torch.optim.optimizer":
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module

        def execute_and_register(module):
            execute(module)
            self.process, self.ends = os.getpid(), []
            module.register_optimizer_step_post_hook(self.after_step)

        spec.loader.exec_module = execute_and_register
        return spec

    def after_step(self, optimizer, *_):
        if os.getpid() != self.process:
            return  # a fork of the program tries a step
        import torch

        if optimizer.param_groups[0]["params"][0].device.type != "cpu":
            torch.accelerator.synchronize()
        self.ends.append(time.monotonic())
        if len(self.ends) == int(os.environ["STEPS_WANTED"]):
            self.end(torch.distributed)

    def end(self, dist):
        if os.environ.get("WORLD_SIZE", "1") != "1":
            dist.barrier()  # raises if the ranks never met, and each has trained for itself
        if os.environ.get("RANK", "0") == "0":
            with open(os.environ["STEPS_FILE"], "w") as file:
                file.writelines(f"{end!r}\n" for end in self.ends)
        import multiprocessing

        for worker in multiprocessing.active_children():  # of a loader; they end late by themselves
            worker.kill()
        os._exit(0)


if "STEPS_FILE" in os.environ:
    sys.meta_path.insert(0, Watch())
