"""Cross-validation: `PYTHONPATH=. python examples/recipes/folds.py`. A sweep works alike.

The file is the task and the program.
"""

from vectors import *


def add_options(parser):
    parser.add_argument("--fold", type=int, default=0)


def build_datasets(args):
    data, numbers = Vectors(args, 100), torch.arange(100)
    return [
        torch.utils.data.Subset(data, numbers[own].tolist())
        for own in (numbers % 4 != args.fold, numbers % 4 == args.fold)
    ]


if __name__ == "__main__":
    from train_single import main

    for fold in range(4):
        main(["--task", __file__, "--fold", str(fold), "--output-dir", f"runs/fold{fold}"])
