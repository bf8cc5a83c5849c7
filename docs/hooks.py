"""Hooks of mkdocs: they link the package under its installed names and write the page of commands."""

import re
import shutil
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "build" / "documented" / "arbordraft"
FOLDERS = {"toolkit": "", "kernels": "kernels", "training": "training", "exports": "exports"}
MARK = "<!-- every command -->"


def on_config(config: Any) -> Any:
    """Links the sources under the names by which they are imported; mkdocstrings reads them there."""
    shutil.rmtree(PACKAGE, ignore_errors=True)
    for folder, package in FOLDERS.items():
        for source in (ROOT / folder).rglob("*.py"):
            link = PACKAGE / package / source.relative_to(ROOT / folder)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(source)
    return config


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Writes the page of commands from the command line itself, so that the two cannot differ."""
    return markdown.replace(MARK, every_command()) if page.file.src_uri == "commands.md" else markdown


def on_page_content(html: str, **_: Any) -> str:
    """Shows Sphinx roles of docstrings, such as :meth:`~a.B.c`, as names, and the true paths of sources."""
    html = re.sub(r":(?:attr|class|func|meth|mod):<code>(?:~[\w.]*\.)?([\w.]+)</code>", r"<code>\1</code>", html)
    return html.replace("build/documented/arbordraft/", "toolkit/")


def every_command() -> str:
    """Returns usage, arguments and options of all commands, each below its own heading."""
    import typer
    from typer.cli import get_docs_for_click

    from arbordraft.cli.main import app

    command = typer.main.get_command(app)
    described = get_docs_for_click(obj=command, ctx=command.context_class(command), name="arbordraft")
    described = described[described.index("\n## ") :]  # after the heading of the page
    return described.replace("[--", r"\[--")  # otherwise options in a help text become links
