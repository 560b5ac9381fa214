"""The scheduler's rules that `scripts/mutate.py` found untested."""


def test_x():
    pass
