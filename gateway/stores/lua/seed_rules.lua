-- Gives an empty Redis its first rule set, and the switches of one that has lost them. Many workers may try at once;
-- one of them does it.
--
-- KEYS[1] the rules: a hash of `revision`, `rules` (JSON), `switches_revision`, `switches` (JSON), `frozen_until_ms`
-- KEYS[2] the history: a hash of `<revision>` (a heading) and `<revision>:rules`
-- ARGV    revision, rules, channel, heading, the switches' revision (0 = no switches to give), switches, until when
--         changes are frozen
-- Returns 1 when this call wrote them, 0 when there were rules, or something that is not ours

local has_switches = redis.call('HEXISTS', KEYS[1], 'switches_revision') == 1
if redis.call('HEXISTS', KEYS[1], 'revision') == 1 or redis.call('HEXISTS', KEYS[1], 'rules') == 1 then
  return 0
end
if redis.call('EXISTS', KEYS[1]) == 1 and not has_switches then
  return 0
end
redis.call('HSET', KEYS[1], 'revision', ARGV[1], 'rules', ARGV[2])
redis.call('HSET', KEYS[2], ARGV[1], ARGV[4], ARGV[1] .. ':rules', ARGV[2])
if ARGV[5] ~= '0' and not has_switches then
  redis.call('HSET', KEYS[1], 'switches_revision', ARGV[5], 'switches', ARGV[6], 'frozen_until_ms', ARGV[7])
end
redis.call('PUBLISH', ARGV[3], ARGV[1])
return 1
