"""What MkDocs does beside its plugins: links that leave docs/ lead to the repository, and must lead to something there.

Links to rustdoc, which is copied beside the pages afterwards, become HTML: MkDocs does not know their targets. check.py does.
"""

import logging
import re
from pathlib import Path

LOG = logging.getLogger("mkdocs.hooks.rapt")
ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
LINK = re.compile(r"(?<=\]\()(\.\./[^)\s#]*)(#[^)\s]*)?(?=\))")
RUST = re.compile(r"\[([^\]]+)\]\((\.\./rust/[^)\s]+)\)")
FENCE = re.compile(r"^(```.*?^```$)", re.DOTALL | re.MULTILINE)


def on_page_markdown(markdown, page, config, files):
    folder = (DOCS / page.file.src_uri).parent

    def outside(match):
        target = (folder / match[1]).resolve()
        if target.is_relative_to(DOCS) or not target.is_relative_to(ROOT):
            return match[0]
        path = target.relative_to(ROOT).as_posix()
        if not target.exists():
            # A warning is an error under --strict.
            LOG.warning("%s links to %s, which is not in the repository", page.file.src_uri, path)
        kind = "tree" if target.is_dir() else "blob"
        return f"{config.repo_url}/{kind}/main/{path}{match[2] or ''}"

    parts = FENCE.split(markdown)
    return "".join(part if part.startswith("```") else LINK.sub(outside, RUST.sub(r'<a href="\2">\1</a>', part)) for part in parts)
