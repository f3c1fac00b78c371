-- Gives an empty Redis its first rule set. Many workers may try at once; one of them does it.
--
-- KEYS[1] the rules: a hash of `revision` and `rules` (JSON)
-- ARGV    revision, rules, channel
-- Returns 1 when this call wrote them, 0 when there were rules

if redis.call('EXISTS', KEYS[1]) == 1 then
  return 0
end
redis.call('HSET', KEYS[1], 'revision', ARGV[1], 'rules', ARGV[2])
redis.call('PUBLISH', ARGV[3], ARGV[1])
return 1
