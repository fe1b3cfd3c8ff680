"""Command lines of short runs that several test files start."""

from harness import TASKS

SMALL = ("--task", str(TASKS / "small.py"), *"--epochs 4 --batch-size 30 --log-every 4".split())
ODD = ("--task", str(TASKS / "odd.py"), "--dtype", "float64", "--batch-size", "30", "--epochs", "3")
ODD += ("--lr", "0.05", "--log-every", "1", "--warmup-epochs", "0.5")
NOISE = (*ODD, "--model", "conv+noise")
