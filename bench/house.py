"""How readable the code is, in numbers: `python bench/house.py [FOLDER] [--list]`.

Counts each name that a function or a module binds (assignments, loops, arguments, comprehensions,
patterns), and which of them are words that do not say what their value is. `--list` shows these
with their places. Run by hand: a number is a reason to look, and not a limit to be met by synonyms.
"""

import argparse
import ast
import io
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VAGUE = frozenset(
    (
        *("one", "found", "made", "given", "own", "seen", "what", "known", "wanted", "kept"),
        *("rest", "left", "other", "others", "here", "there", "read", "sent"),
    )
)


def bound_names(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Each name that is bound, and its line."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
                yield name, node.lineno
            case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                yield name, node.lineno
            case ast.ExceptHandler(name=str(name)):
                yield name, node.lineno
            case _:
                pass


def commented_lines(text: str) -> int:
    """The number of lines that have a comment."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return len({token.start[0] for token in tokens if token.type == tokenize.COMMENT})


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="How readable the code is, in numbers.")
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "k8sjob")
    parser.add_argument("--list", action="store_true", help="show each vague name with its place")
    options = parser.parse_args()
    vague, lengths = Counter[str](), list[int]()
    files = names = lines = comments = 0
    for path in sorted(options.folder.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
        files, lines = files + 1, lines + text.count("\n")
        comments += commented_lines(text)
        for name, line in bound_names(tree):
            names += 1
            if name in VAGUE:
                vague[name] += 1
                if options.list:
                    print(f"{path}:{line}: {name}")
        functions = [part for part in ast.walk(tree) if isinstance(part, ast.FunctionDef)]
        lengths += [(part.end_lineno or part.lineno) - part.lineno + 1 for part in functions]
    most = ", ".join(f"{name} {count}" for name, count in vague.most_common(6))
    print(f"files                      {files:8,}")
    print(f"lines                      {lines:8,}")
    print(f"lines with a comment       {100 * comments / max(lines, 1):8.1f} %")
    print(f"lines of a function, mean  {sum(lengths) / max(len(lengths), 1):8.1f}")
    print(f"vague names                {100 * vague.total() / max(names, 1):8.1f} %  ({most})")


if __name__ == "__main__":
    main()
