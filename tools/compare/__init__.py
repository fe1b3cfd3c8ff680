"""Whether two training commands are the same training run: compare.py. `same_run` is for tests."""


def same_run(command_a: str, command_b: str, **options):
    """Raise AssertionError with the report if two commands are not the same training run.

    Options: steps, even_names, float64, timeout. A command that cannot run raises CannotRun.
    """
    from tools.compare.compare import compare

    result = compare(command_a, command_b, **{"say": lambda text: None, **options})
    assert result.same, "\n".join(result.lines)
    return result
