-- Gives an empty Redis its first rule set, and one that has forgotten the newest changes what a worker knows of them.
-- Many workers may try at once; who knows more goes before who was quicker, and an operator's later change before both.
--
-- KEYS[1] the rules: a hash of `revision`, `rules` (JSON), `switches_revision`, `switches` (JSON), `frozen_until_ms`,
--         and `changed_ms`: when somebody changed any of it last
-- KEYS[2] the history: a hash of `<revision>` (a heading) and `<revision>:rules`
-- ARGV    revision, rules, channel, heading, the switches' revision (0 = no switches to give), switches, until when
--         changes are frozen, the revision of the switches that these were made from (0 = none), when what the worker
--         knows was changed last (0 = never)
-- Returns 1 when this call wrote them, 0 when there was as much, or something that is not ours

local stored = redis.call('HMGET', KEYS[1], 'revision', 'rules', 'switches_revision', 'changed_ms')
local revision, switches = tonumber(stored[1] or '') or 0, tonumber(stored[3] or '') or 0
local changed, known = tonumber(stored[4] or '') or 0, tonumber(ARGV[9])
if stored[1] or stored[2] then
  if changed >= known or revision > tonumber(ARGV[1]) or switches > tonumber(ARGV[5]) then
    return 0
  end
elseif redis.call('EXISTS', KEYS[1]) == 1 and not stored[3] then
  return 0
end
if switches ~= tonumber(ARGV[8]) then
  return 0
end

redis.call('HSET', KEYS[1], 'revision', ARGV[1], 'rules', ARGV[2])
redis.call('HDEL', KEYS[1], 'at_ms')
redis.call('HSET', KEYS[2], ARGV[1], ARGV[4], ARGV[1] .. ':rules', ARGV[2])
if ARGV[5] ~= '0' then
  redis.call('HSET', KEYS[1], 'switches_revision', ARGV[5], 'switches', ARGV[6], 'frozen_until_ms', ARGV[7])
end
if known > changed then
  redis.call('HSET', KEYS[1], 'changed_ms', ARGV[9])
end
redis.call('PUBLISH', ARGV[3], ARGV[1])
return 1
