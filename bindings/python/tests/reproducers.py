"""What every reproducer must be, wherever this checkout lies: its text may hold the path of the callee's folder."""

import ast

LINES = 15


def imported(source):
    """Top-level names of the modules that a program imports."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module.partition(".")[0]


def assert_stands_alone(made):
    """A short program that needs no part of Rapt."""
    source = made["source"]
    assert source is not None and len(source.splitlines()) <= LINES, made
    assert "rapt" not in set(imported(source)), source
