"""The room's Jinja templates (*.j2, beside this file): what a notebook shows of a claim, and the report's pages."""

import functools
from pathlib import Path

import jinja2

from perf_helpers.texts import number_text

FOLDER = Path(__file__).parent


def template(name: str) -> jinja2.Template:
    """A template, e.g. "report.html.j2". What it is given is escaped."""
    return _environment().get_template(name)


@functools.cache
def _environment() -> jinja2.Environment:
    loader = jinja2.FileSystemLoader(FOLDER)
    environment = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["number"] = number_text
    return environment
