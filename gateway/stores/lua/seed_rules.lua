-- Gives an empty Redis its first rule set, and the switches of one that has lost them. Many workers may try at once;
-- one of them does it. Was that one behind, or did it know the configuration file alone, another that knows more does
-- it again, unless an operator has changed something since.
--
-- KEYS[1] the rules: a hash of `revision`, `rules` (JSON), `switches_revision`, `switches` (JSON), `frozen_until_ms`,
--         and `seeded`: both revisions as the last seed left them
-- KEYS[2] the history: a hash of `<revision>` (a heading) and `<revision>:rules`
-- ARGV    revision, rules, channel, heading, the switches' revision (0 = no switches to give), switches, until when
--         changes are frozen, the revision of the switches that these were made from (0 = none)
-- Returns 1 when this call wrote something, 0 when there was as much, or something that is not ours

local stored = redis.call('HMGET', KEYS[1], 'revision', 'rules', 'switches_revision', 'seeded')
local revision, switches = tonumber(stored[1] or '') or 0, tonumber(stored[3] or '') or 0
local is_seed = stored[4] == revision .. '/' .. switches
local has_rules = stored[1] or stored[2]
if has_rules and not is_seed then
  return 0
end
if redis.call('EXISTS', KEYS[1]) == 1 and not (has_rules or stored[3]) then
  return 0
end
if switches ~= tonumber(ARGV[8]) then
  return 0
end
local gives_rules, gives_switches = revision < tonumber(ARGV[1]), switches < tonumber(ARGV[5])
if not (gives_rules or gives_switches) then
  return 0
end
local is_whole = is_seed or not stored[3]
if gives_rules then
  revision = ARGV[1]
  redis.call('HSET', KEYS[1], 'revision', revision, 'rules', ARGV[2])
  redis.call('HDEL', KEYS[1], 'at_ms')
  redis.call('HSET', KEYS[2], revision, ARGV[4], revision .. ':rules', ARGV[2])
end
if gives_switches then
  switches = ARGV[5]
  redis.call('HSET', KEYS[1], 'switches_revision', switches, 'switches', ARGV[6], 'frozen_until_ms', ARGV[7])
end
if is_whole then
  redis.call('HSET', KEYS[1], 'seeded', revision .. '/' .. switches)
end
redis.call('PUBLISH', ARGV[3], revision)
return 1
