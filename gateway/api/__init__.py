"""The data plane's HTTP: path tables, short handlers, codecs to and from core types, one error table."""
