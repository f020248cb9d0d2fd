"""Pages of the site as Chromium renders them: text is there, the picture is not blank, the console has no error.

The browser is Debian's `chromium`; where none is installed the test is skipped, and says so. Pictures stay in target/site-pictures.
"""

import functools
import http.server
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--hide-scrollbars", "--enable-logging=stderr", "--v=0",
    # What has not been drawn by then is not drawn.
    "--virtual-time-budget=5000",
]  # fmt: skip
# A page, a text that it must show, the widths of a desktop's and a phone's window.
PAGES = [
    ("index.html", "attention engine"),
    ("reference/numerics.html", "Accumulation"),
    ("reference/python.html", "scaled_dot_product_attention"),
]
SIZES = {"desktop": (1280, 1600), "phone": (500, 1600)}
# A PNG of one colour has 3 to 10 kB at these sizes, one with a screen of text over 60.
FEWEST_BYTES = 25_000


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


def browse(browser, address, size, *flags):
    with tempfile.TemporaryDirectory() as profile:
        command = [browser, *FLAGS, f"--user-data-dir={profile}", f"--window-size={size[0]},{size[1]}", *flags, address]
        return subprocess.run(command, capture_output=True, text=True, timeout=120)


def main(site):
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        print(f"skipped: {len(PAGES) * len(SIZES)} pictures, no Chromium ({', '.join(BROWSERS)})")
        return 0
    pictures = site.parent / "site-pictures"
    pictures.mkdir(exist_ok=True)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=site))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    findings = []
    for page, text in PAGES:
        address = f"http://127.0.0.1:{server.server_port}/{page}"
        shown = browse(browser, address, SIZES["desktop"], "--dump-dom")
        if text not in shown.stdout:
            findings.append(f"{page} does not show {text!r}")
        for name, size in SIZES.items():
            picture = pictures / f"{page.replace('/', '-').removesuffix('.html')}-{name}.png"
            picture.unlink(missing_ok=True)
            run = browse(browser, address, size, f"--screenshot={picture}")
            findings += [f"{page}, {name}: {line}" for line in run.stderr.splitlines() if "CONSOLE" in line]
            if not picture.exists():
                findings.append(f"{page}, {name}: no picture, exit code {run.returncode}: {run.stderr[-300:]}")
                continue
            size = picture.stat().st_size
            if size < FEWEST_BYTES:
                findings.append(f"{page}, {name}: a picture of {size} bytes, which is a blank page")
    server.shutdown()
    for finding in findings:
        print(finding)
    print(f"{len(PAGES) * len(SIZES)} pictures in {pictures}, {len(findings)} findings")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve()))
