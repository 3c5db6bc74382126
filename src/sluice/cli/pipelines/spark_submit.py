"""The pipelines for spark-submit: `spark-submit --master spark://host:7077 "$(sluice pipeline script)" archive ...`

The same commands as `sluice pipeline`, on the master that spark-submit was told. Sluice must be installed on the nodes
(`pip install 'sluice[spark]'`): executors read from the broker and write to it by themselves.
"""

from sluice.cli.pipelines.job_commands import app

if __name__ == "__main__":
    app(prog_name="sluice pipeline")
