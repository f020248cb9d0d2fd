"""The built site: every relative link leads to a file and an anchor that are there, and no page loads anything from the network.

MkDocs checks the links that it writes; this one also sees those between the pages and rustdoc, and what themes and plugins add.
Pages of rustdoc are read for their anchors only: rustdoc checks its own links.
"""

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

# Elements that a browser loads by itself.
LOADED = {("script", "src"), ("img", "src"), ("iframe", "src"), ("source", "src"), ("video", "src"), ("object", "data")}
# Relations of <link> that name an address without loading it.
NAMED = {"canonical", "next", "prev", "alternate", "edit"}


class Page(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.links, self.loads, self.anchors = [], [], set()
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self.anchors.update(values[key] for key in ("id", "name") if values.get(key))
        if tag == "a" and values.get("href"):
            self.links.append(values["href"])
        if tag == "link" and values.get("href") and values.get("rel") not in NAMED:
            self.loads.append(values["href"])
        for key in ("src", "data"):
            if (tag, key) in LOADED and values.get(key):
                self.loads.append(values[key])


def main(site):
    pages, findings = {}, []

    def page(path):
        if path not in pages:
            pages[path] = Page(path.read_text(encoding="utf-8"))
        return pages[path]

    own = [path for path in sorted(site.rglob("*.html")) if path.relative_to(site).parts[0] != "rust"]
    for path in own:
        name = path.relative_to(site)
        # The page of an address that does not exist is served from any folder: its links are absolute.
        if name.as_posix() == "404.html":
            continue
        for load in page(path).loads:
            parts = urlsplit(load)
            if parts.scheme != "data" and (parts.scheme or parts.netloc):
                findings.append(f"{name} loads {load}")
        for link in page(path).links + page(path).loads:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if target.is_dir():
                target /= "index.html"
            if not target.is_file():
                findings.append(f"{name} links to {link}, which is not there")
            elif parts.fragment and target.suffix == ".html" and unquote(parts.fragment) not in page(target).anchors:
                # Theme links to the top of a page by a name that every browser knows.
                if parts.fragment != "top":
                    findings.append(f"{name} links to {link}, which has no such anchor")
    for style in sorted(site.rglob("*.css")):
        if style.relative_to(site).parts[0] != "rust" and "url(http" in style.read_text(encoding="utf-8"):
            findings.append(f"{style.relative_to(site)} loads from the network")
    for finding in findings:
        print(finding)
    print(f"{len(own)} pages, {len(findings)} findings")
    return 1 if findings or not own else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve()))
