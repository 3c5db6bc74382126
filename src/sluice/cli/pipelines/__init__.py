"""`sluice pipeline`: the pipelines of `sluice.spark` as commands."""

from sluice.cli.pipelines import job_commands

__all__ = ["job_commands"]
