"""Reports of pipelines: one HTML file each, with charts as SVG; it loads nothing else."""
