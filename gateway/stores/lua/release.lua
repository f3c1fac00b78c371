-- Gives a name up, if it is still the owner's.
--
-- KEYS[1] the name
-- ARGV    owner
-- Returns 1 when it was

if redis.call('GET', KEYS[1]) ~= ARGV[1] then
  return 0
end
redis.call('DEL', KEYS[1])
return 1
