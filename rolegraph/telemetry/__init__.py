"""What a run tells: metrics, loggers, the progress display, samples and the report."""

from rolegraph.telemetry.metrics import MetricsLog, read_metrics
from rolegraph.telemetry.telemetry import Telemetry

__all__ = ["MetricsLog", "Telemetry", "read_metrics"]
