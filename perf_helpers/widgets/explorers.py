"""Explorers: pictures of memory and speed that follow their controls. Each stands in a module of its own.

The contract of an explorer, beside that of `frame`:

- It is one public function, which takes a lab or runs, shows itself with `frame.place` and returns None. It raises
  ValueError where there is nothing to explore, before anything is shown.
- What is shown is computed by plain functions, which tests call without a widget, and drawn by `drawings`: a move of a
  control answers within 150 ms. The picture says its values and units in words too.
- Without a front end a static picture or table of where it started stays, from `plots`.
- What takes longer than a glance is done by one thread in the background. It begins when a control is first moved,
  waits while an experiment is measured (`processes.are_measuring`), and ends with its widget (`at_end` of `place`).
"""

from perf_helpers.widgets.memory_explorer import memory
from perf_helpers.widgets.recipe_explorer import recipes
from perf_helpers.widgets.timeline_explorer import timeline

__all__ = ["memory", "recipes", "timeline"]
