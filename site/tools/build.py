"""Build the site: export the schedules, write the benchmark data, run mkdocs, check every link; ``--browser`` drives it.

``python site/tools/build.py [--browser] [--site-dir DIR]``. Exit code 0 means that everything that was asked for held.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
SITE = HERE.parent
ROOT = SITE.parent
sys.path.insert(0, str(HERE))


def run(what: str, command: list[str], **environment: str) -> None:
    """Run a command, say how long it took, and stop the build when it fails."""
    start = time.perf_counter()
    code = subprocess.run(command, cwd=ROOT, env={**os.environ, **environment}, check=False).returncode
    print(f"{what}: {'done' if code == 0 else f'failed ({code})'} in {time.perf_counter() - start:.1f} s", flush=True)
    if code:
        sys.exit(code)


def main(arguments: list[str] | None = None) -> None:
    """Build, check, and optionally drive the site in a browser."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--browser", action="store_true", help="drive the result in headless Chromium")
    parser.add_argument("--site-dir", type=Path, default=ROOT / "build" / "site")
    options = parser.parse_args(arguments)
    start = time.perf_counter()

    data = SITE / "docs" / "data"
    run("schedules", [sys.executable, str(HERE / "export_tiles.py"), str(data / "tiles.json")], TRITON_INTERPRET="1")
    import bench_page

    (data / "results.json").write_text(json.dumps(bench_page.page_data(bench_page.load()), separators=(",", ":")))
    # mkdocs-material prints an advertisement for its successor unless told not to
    mkdocs = [sys.executable, "-m", "mkdocs", "build", "--strict", "--clean", "--quiet", "-f", str(SITE / "mkdocs.yml")]
    run("mkdocs", [*mkdocs, "--site-dir", str(options.site_dir)], NO_MKDOCS_2_WARNING="1")

    import links

    broken = links.broken(options.site_dir)
    for sentence in broken:
        print(sentence)
    print(f"links: {len(broken)} broken; the site was built in {time.perf_counter() - start:.1f} s", flush=True)
    if broken:
        sys.exit(1)
    print(f"to look at it: python -m http.server -d {options.site_dir}", flush=True)
    if options.browser:
        tests = [sys.executable, "-m", "pytest", str(SITE / "tests"), "-q", "-m", "browser"]
        run("browser", tests, FLASHTRI_SITE=str(options.site_dir.resolve()))


if __name__ == "__main__":
    main()
