"""Numbers and names in words, the same in lessons, tables, pictures and reports."""

from perf_helpers.unknown import is_measured


def bytes_text(size: float | None) -> str:
    """Bytes in the unit a person would use (decimal: 1 MB = 10^6 bytes); None and unknown read "not measured"."""
    if not is_measured(size):
        return "not measured"
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(size) >= scale:
            return f"{size / scale:,.2f} {unit}" if unit == "GB" else f"{size / scale:,.1f} {unit}"
    return f"{size:,.0f} B"


def seconds_text(seconds: float | None) -> str:
    """Seconds in the unit a person would use."""
    if not is_measured(seconds):
        return "not measured"
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds:.1e} s"


def name_text(category: str) -> str:
    """A category as it stands in a legend."""
    return category.replace("_", " ")
