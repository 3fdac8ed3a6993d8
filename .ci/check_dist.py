"""Does dist/ hold every file of the package, each exactly once? ``python .ci/check_dist.py``"""

import sys
import tarfile
import zipfile
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CODE = (".py", ".html", ".css", ".js", ".LICENSE")


def files(folder: str) -> set[str]:
    """The files of a folder of the checkout, without the link to passes/."""
    found = (p for p in (ROOT / folder).rglob("*") if p.is_file() and p.suffix in CODE)
    names = {p.relative_to(ROOT).as_posix() for p in found}
    return {n for n in names if not n.startswith("streambp_compile/passes/")}


def of_code(names: list[str]) -> Counter:
    return Counter(n for n in names if n.endswith(CODE))


def main() -> int:
    (wheel,), (source,) = (ROOT / "dist").glob("*.whl"), (ROOT / "dist").glob("*.tar.gz")
    wanted = {f"streambp_compile/{name}" for name in files("passes")} | files("streambp_compile")
    with tarfile.open(source) as archive:
        in_source = of_code([n.partition("/")[2] for n in archive.getnames()])
    in_wheel = of_code(zipfile.ZipFile(wheel).namelist())
    wrong = [f"{source.name}: {n}" for n in sorted(in_source.keys() ^ wanted)]
    wrong += [f"{wheel.name}: {n}" for n in sorted(in_wheel.keys() ^ wanted)]
    wrong += [
        f"twice: {n}" for n, count in (in_source + in_wheel).items() if max(in_source[n], in_wheel[n]) > 1
    ]
    print("\n".join(wrong) or f"{len(wanted)} files, each once, in {wheel.name} and {source.name}")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
