"""The console's pages, in the order of its menu."""

from typing import Final

from gateway.console.pages.audit import PAGE as AUDIT
from gateway.console.pages.backends import PAGE as BACKENDS
from gateway.console.pages.keys import PAGE as KEYS
from gateway.console.pages.models import PAGE as MODELS
from gateway.console.pages.overview import PAGE as OVERVIEW
from gateway.console.pages.requests import PAGE as REQUESTS
from gateway.console.pages.rollouts import PAGE as ROLLOUTS
from gateway.console.pages.rules import PAGE as RULES
from gateway.console.pages.shadows import PAGE as SHADOWS
from gateway.console.pages.switches import PAGE as SWITCHES

PAGES: Final = (OVERVIEW, RULES, ROLLOUTS, SWITCHES, BACKENDS, MODELS, REQUESTS, SHADOWS, KEYS, AUDIT)
