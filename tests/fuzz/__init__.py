"""Hostile input, made from the structure of what it attacks (docs/hostile-input.md)."""

from tests.fuzz import codecs, files, servers, texts

TARGETS = (*codecs.TARGETS, *texts.TARGETS, *files.TARGETS, *servers.TARGETS)
