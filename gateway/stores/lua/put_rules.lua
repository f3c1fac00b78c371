-- Puts a rule set in place of the one it was made from, and tells the workers; or changes nothing.
--
-- KEYS[1] the rules: a hash of `revision`, `rules` (JSON) and `at_ms`
-- ARGV    expected revision (0 = none yet), rules, channel, at_ms (from when they are in force; 0 = at once)
-- Returns {1, new revision}, or {0, current revision} when the set was made from another one

local current = tonumber(redis.call('HGET', KEYS[1], 'revision') or '') or 0
local expected = tonumber(ARGV[1])

-- A client whose connection broke after the write sends it again: that is not a conflict.
if current == expected + 1 and redis.call('HGET', KEYS[1], 'rules') == ARGV[2] then
  return {1, current}
end
if current ~= expected then
  return {0, current}
end

local revision = string.format('%.0f', expected + 1)
redis.call('HSET', KEYS[1], 'revision', revision, 'rules', ARGV[2], 'at_ms', ARGV[4])
redis.call('PUBLISH', ARGV[3], revision)
return {1, expected + 1}
