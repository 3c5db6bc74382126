"""The pipelines for spark-submit.

    spark-submit --master spark://host:7077 "$(sluice pipeline script)" archive ...

The commands are those of `sluice pipeline`, on the master of spark-submit. Sluice must be installed
on the nodes (`pip install 'sluice[spark]'`): executors read from the broker and write to it
directly.
"""

from sluice.cli.pipelines.job_commands import app

if __name__ == "__main__":
    app(prog_name="sluice pipeline")
