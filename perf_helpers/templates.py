"""Load the course's Jinja templates, with the filters that all of them use."""

import functools
from pathlib import Path
from typing import TYPE_CHECKING

from trainmem.texts import bytes_text, name_text, number_text

if TYPE_CHECKING:
    import jinja2


@functools.cache
def template(path: str) -> "jinja2.Template":
    """Return a template of this package by its path, e.g. "course/report.html.j2"; variables are escaped as HTML."""
    import jinja2

    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"number": number_text, "bytes": bytes_text, "name": name_text, "percent": "{:.2%}".format}
    return environment.get_template(path)
