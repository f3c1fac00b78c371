#!/bin/sh
# Redis with one user, whose password comes from the environment: so it stands in no file of the project, on no command
# line and, as its SHA-256, in a file in memory alone. The user's rights are those of docs/redis.md.
set -eu
: "${GATEWAY_REDIS_PASSWORD:?}"
digest=$(printf %s "$GATEWAY_REDIS_PASSWORD" | sha256sum | cut -d ' ' -f 1)
umask 077
cat > /tmp/users.acl <<END
user default off resetpass
user gateway on #$digest resetkeys ~gateway:* resetchannels &gateway:* -@all +@read +@write -@dangerous +eval +evalsha +time +publish +subscribe +unsubscribe +ping +select +asking +cluster|slots
END
unset GATEWAY_REDIS_PASSWORD REDISCLI_AUTH
# Rules, keys and usage survive a restart by the append-only log; snapshots would add nothing to it. Full, Redis refuses
# rather than forget a counter.
exec redis-server --bind 0.0.0.0 --port 6379 --dir /data --aclfile /tmp/users.acl \
    --appendonly yes --appendfsync everysec --save "" --maxmemory 512mb --maxmemory-policy noeviction
