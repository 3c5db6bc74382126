"""Pages that a pipeline leaves behind: one HTML file, charts drawn into it, nothing fetched from anywhere."""
