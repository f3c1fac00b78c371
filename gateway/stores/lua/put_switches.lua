-- Puts a list of switches in place of the one it was made from, and tells the workers; or changes nothing.
--
-- KEYS[1] the rules: a hash of `switches_revision`, `switches` (JSON), `frozen_until_ms`, `changed_ms` (when somebody
--         changed any of it last, always later than before), and more that is not touched
-- ARGV    expected revision of the switches (0 = none yet), switches, until when changes of rules are frozen (Unix
--         milliseconds, 0 = not), channel
-- Returns {1, new revision}, or {0, current revision} when the list was made from another one

local current = tonumber(redis.call('HGET', KEYS[1], 'switches_revision') or '') or 0
local expected = tonumber(ARGV[1])

-- A client whose connection broke after the write sends it again: that is not a conflict.
if current == expected + 1 and redis.call('HGET', KEYS[1], 'switches') == ARGV[2] then
  return {1, current}
end
if current ~= expected then
  return {0, current}
end

local revision = string.format('%.0f', expected + 1)
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local changed = math.max(now, (tonumber(redis.call('HGET', KEYS[1], 'changed_ms') or '') or 0) + 1)
redis.call('HSET', KEYS[1], 'switches_revision', revision, 'switches', ARGV[2], 'frozen_until_ms', ARGV[3])
redis.call('HSET', KEYS[1], 'changed_ms', string.format('%.0f', changed))
redis.call('PUBLISH', ARGV[4], revision)
return {1, expected + 1}
