"""Reproduce the bugs of docs/found.md: `python docs/found/run.py [NAME ...]`.

Each script names its packages in its head. Scripts with the same packages share one environment, which is new; each
runs twice in it. Prints a table; the status is 1 if one does not reproduce.
"""

import collections
import pathlib
import re
import subprocess
import sys
import tempfile
import tomllib

HERE = pathlib.Path(__file__).resolve().parent
PATIENCE = 300
"""Seconds for a script."""


def main(names):
    """Run the named scripts, or all of them; return the exit status."""
    by_packages = collections.defaultdict(list)
    for path in sorted(HERE.glob("*_*.py")):
        if not names or path.stem in names:
            by_packages[packages(path)].append(path)
    failed = 0
    for needed, paths in by_packages.items():
        print(f"\n{' '.join(needed)}", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run([sys.executable, "-m", "venv", folder], check=True)
            python = pathlib.Path(folder, "bin", "python")
            subprocess.run([python, "-m", "pip", "install", "-q", *needed], check=True)
            for path in paths:
                runs = [run(python, path) for _ in range(2)]
                failed += any(status for status, _ in runs)
                print(f"{path.stem:28} {runs[0][1]:42} {runs[1][1]}", flush=True)
    print(f"\n{failed} do not reproduce")
    return int(failed > 0)


def packages(path):
    """Return the packages that a script names in its head."""
    head = re.search(r"^# /// script\n(.*?)^# ///$", path.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    return tuple(tomllib.loads(re.sub(r"^# ?", "", head[1], flags=re.MULTILINE))["dependencies"])


def run(python, path):
    """Return the exit status of a script and its line of figures."""
    try:
        done = subprocess.run([python, path], capture_output=True, text=True, timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        return 1, f"no answer in {PATIENCE} s"
    figures = re.findall(r"DIFFERENCE.*", done.stdout)
    return done.returncode, figures[-1] if figures else (done.stderr.strip().splitlines() or ["nothing"])[-1][:42]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
