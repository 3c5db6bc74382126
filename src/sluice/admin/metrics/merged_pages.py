"""One metrics page of several: the pages of all processes of a node become that of the node.

Samples with the same name and labels are added. The exceptions are in the tables below: what
describes one process gets its name as the label `process`, and a few values are not sums.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

# Families whose samples get the label `process`; a name that ends with `_` stands for a prefix.
LABELLED: Final = ("process_", "sluice_memory_bytes", "sluice_memory_limit_bytes")
LARGEST: Final = frozenset(
    {
        "python_info",
        "sluice_cluster_cells_moving",
        "sluice_cluster_nodes",
        "sluice_scrape_longest_slice_seconds",
        "sluice_uptime_seconds",
    }
)
SMALLEST: Final = frozenset({"sluice_store_up"})
UP_METRIC: Final = "sluice_process_up"


def merge_pages(pages: Mapping[str, str | None]) -> str:
    """Merge the pages of processes by name; None is a process that did not answer."""
    headers: dict[str, list[str]] = {}  # by family
    samples: dict[str, dict[str, list[str]]] = {}  # by family and sample: values
    for process, page in pages.items():
        family = ""
        for line in (page or "").splitlines():
            if line.startswith("#"):
                family = line.split(" ", 3)[2]
                header = headers.setdefault(family, [])
                if line not in header:
                    header.append(line)
                samples.setdefault(family, {})
            elif line:
                sample, _, value = line.rpartition(" ")
                if _is_labelled(family):
                    sample = _add_label(sample, process)
                samples[family].setdefault(sample, []).append(value)
    lines = [
        f"# HELP {UP_METRIC} 1: the process of this node answers.",
        f"# TYPE {UP_METRIC} gauge",
    ]
    lines += [
        f'{UP_METRIC}{{process="{process}"}} {int(page is not None)}'
        for process, page in pages.items()
    ]
    for family, header in headers.items():
        lines += header
        lines += [
            f"{sample} {_combine(family, values)}" for sample, values in samples[family].items()
        ]
    return "\n".join(lines) + "\n"


def _is_labelled(family: str) -> bool:
    return any(family.startswith(one) if one.endswith("_") else family == one for one in LABELLED)


def _add_label(sample: str, process: str) -> str:
    name, brace, labels = sample.partition("{")
    return f'{name}{{process="{process}"{"," if brace else ""}{labels or "}"}'


def _combine(family: str, values: list[str]) -> str:
    if len(values) == 1:
        return values[0]
    if family in LARGEST:
        return max(values, key=float)
    if family in SMALLEST:
        return min(values, key=float)
    if all(value.lstrip("-").isdecimal() for value in values):
        return str(sum(map(int, values)))
    return repr(sum(map(float, values)))
