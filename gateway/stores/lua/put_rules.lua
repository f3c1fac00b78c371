-- Puts a rule set in place of the one it was made from, keeps it in the history and tells the workers; or changes
-- nothing.
--
-- KEYS[1] the rules: a hash of `revision`, `rules` (JSON), `at_ms`, `frozen_until_ms`, `changed_ms` (when somebody
--         changed any of it last, always later than before), and more that is not touched
-- KEYS[2] the history: a hash of `<revision>` (a heading) and `<revision>:rules`
-- ARGV    expected revision (0 = none yet), rules, channel, at_ms (from when they are in force; 0 = at once),
--         heading, how many revisions are kept, 1 where a freeze does not hold it
-- Returns {1, new revision}; {0, current revision} when the set was made from another one; {-1, until when, in Unix
-- milliseconds} where changes are frozen

local current = tonumber(redis.call('HGET', KEYS[1], 'revision') or '') or 0
local expected = tonumber(ARGV[1])

-- A client whose connection broke after the write sends it again: that is not a conflict.
if current == expected + 1 and redis.call('HGET', KEYS[1], 'rules') == ARGV[2] then
  return {1, current}
end

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local frozen_until = tonumber(redis.call('HGET', KEYS[1], 'frozen_until_ms') or '') or 0
if now < frozen_until and ARGV[7] ~= '1' then
  return {-1, frozen_until}
end
if current ~= expected then
  return {0, current}
end

local revision = string.format('%.0f', expected + 1)
local changed = math.max(now, (tonumber(redis.call('HGET', KEYS[1], 'changed_ms') or '') or 0) + 1)
redis.call('HSET', KEYS[1], 'revision', revision, 'rules', ARGV[2], 'at_ms', ARGV[4])
redis.call('HSET', KEYS[1], 'changed_ms', string.format('%.0f', changed))
redis.call('HSET', KEYS[2], revision, ARGV[5], revision .. ':rules', ARGV[2])
redis.call('PUBLISH', ARGV[3], revision)

local beyond = redis.call('HLEN', KEYS[2]) / 2 - tonumber(ARGV[6])
if beyond > 0 then
  local kept = {}
  for _, field in ipairs(redis.call('HKEYS', KEYS[2])) do
    local number = tonumber(field)
    if number then
      kept[#kept + 1] = number
    end
  end
  table.sort(kept)
  for i = 1, math.min(beyond, #kept - 1) do
    local oldest = string.format('%.0f', kept[i])
    redis.call('HDEL', KEYS[2], oldest, oldest .. ':rules')
  end
end
return {1, expected + 1}
