-- Takes a name, or keeps it, for a while.
--
-- KEYS[1] the name
-- ARGV    owner, milliseconds
-- Returns 1 when it is the owner's now, 0 while it is another's

local owner = redis.call('GET', KEYS[1])
if owner and owner ~= ARGV[1] then
  return 0
end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
