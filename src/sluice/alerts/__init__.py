"""Alerts for dead letters: webhooks, and handlers of plug-ins."""

from sluice.alerts.alert_sender import AlertHandler, AlertSender, load_alert_handlers
from sluice.alerts.ssrf_guard import SsrfGuard

__all__ = ["AlertHandler", "AlertSender", "SsrfGuard", "load_alert_handlers"]
