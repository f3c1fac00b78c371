-- The end of a claim, with an answer that is kept or without: gateway/ports.py::Answers.keep and release.
--
-- KEYS[1] the claim, KEYS[2] the kept answer: see claim_answer.lua
-- KEYS[3] the owner's index: a sorted set of its slots' names by the end of their answers (ms)
-- KEYS[4] a hash of their sizes by name, and of `total`, which is no slot's name
-- ARGV    the claim's "<by> <fingerprint>", channel, the slot for the channel; and to keep an answer: its name, the
--         fingerprint, the answer, for how long (ms), how much room it takes and the owner's bound (bytes), what the
--         keys of its answers begin with
-- Returns 1, or 0 where the claim is no longer the slot's
--
-- The keys of answers that make room are made here: all of an owner's keys are in one slot of a cluster.

if redis.call('GET', KEYS[1]) ~= ARGV[1] then
  return 0
end
redis.call('DEL', KEYS[1])
redis.call('PUBLISH', ARGV[2], ARGV[3])
if not ARGV[4] then
  return 1
end

local function forget(name)
  local size = tonumber(redis.call('HGET', KEYS[4], name) or '0')
  redis.call('HDEL', KEYS[4], name)
  redis.call('ZREM', KEYS[3], name)
  redis.call('DEL', ARGV[10] .. name)
  return redis.call('HINCRBY', KEYS[4], 'total', 0 - size)
end

local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local name, ttl, bound, size = ARGV[4], tonumber(ARGV[7]), tonumber(ARGV[9]), tonumber(ARGV[8])
local total = forget(name)
for _, ended in ipairs(redis.call('ZRANGEBYSCORE', KEYS[3], '-inf', now, 'LIMIT', 0, 100)) do
  total = forget(ended)
end
while total > 0 and total + size > bound do
  local first = redis.call('ZRANGE', KEYS[3], 0, 0)
  if not first[1] then
    break
  end
  total = forget(first[1])
end
if size <= bound then
  redis.call('HSET', KEYS[2], 'fingerprint', ARGV[5], 'answer', ARGV[6], 'at', string.format('%.0f', now))
  redis.call('PEXPIRE', KEYS[2], ARGV[7])
  redis.call('ZADD', KEYS[3], string.format('%.0f', now + ttl), name)
  redis.call('HSET', KEYS[4], name, size)
  redis.call('HINCRBY', KEYS[4], 'total', size)
end
for _, key in ipairs({KEYS[3], KEYS[4]}) do
  if redis.call('PTTL', key) < ttl then
    redis.call('PEXPIRE', key, ARGV[7])
  end
end
return 1
