"""Pages of the site as Chromium renders them: text is there, pixels differ, the console has no error.

The browser is Debian's `chromium`; where none is installed the test is skipped, and says so. Pictures stay in target/site-pictures.
"""

import functools
import http.server
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
import zlib
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
# A page of one colour is blank; anti-aliased text alone gives dozens.
FEWEST_COLOURS = 20


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


def pixels(path):
    """Width, and the rows of a PNG of 8 bits without interlacing, which is what Chromium writes."""
    data = path.read_bytes()
    width, height, depth, kind = struct.unpack(">IIBB", data[16:26])
    channels = {2: 3, 6: 4}[kind]
    assert depth == 8, depth
    packed, at = b"", 8
    while at < len(data):
        (size,) = struct.unpack(">I", data[at : at + 4])
        if data[at + 4 : at + 8] == b"IDAT":
            packed += data[at + 8 : at + 8 + size]
        at += 12 + size
    raw, stride, rows, above = zlib.decompress(packed), width * channels, [], bytes(width * channels)
    for y in range(height):
        method, line = raw[y * (stride + 1)], bytearray(raw[y * (stride + 1) + 1 : (y + 1) * (stride + 1)])
        for x in range(stride):
            left = line[x - channels] if x >= channels else 0
            corner = above[x - channels] if x >= channels else 0
            if method == 1:
                line[x] = line[x] + left & 255
            elif method == 2:
                line[x] = line[x] + above[x] & 255
            elif method == 3:
                line[x] = line[x] + (left + above[x] >> 1) & 255
            elif method == 4:
                guess = left + above[x] - corner
                line[x] = line[x] + min((left, above[x], corner), key=lambda value: abs(guess - value)) & 255
        rows.append([bytes(line[x : x + channels]) for x in range(0, stride, channels * 4)])
        above = bytes(line)
    return rows


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
            colours = {pixel for row in pixels(picture)[::4] for pixel in row}
            if len(colours) < FEWEST_COLOURS:
                findings.append(f"{page}, {name}: {len(colours)} colours, which is a blank page")
    server.shutdown()
    for finding in findings:
        print(finding)
    print(f"{len(PAGES) * len(SIZES)} pictures in {pictures}, {len(findings)} findings")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve()))
