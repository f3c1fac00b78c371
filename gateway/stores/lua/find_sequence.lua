-- The pin of a sequence, its lease and that of its number renewed: gateway/core/sequences.py::Pins.find; a
-- random-history test proves the two equal. All times are whole microseconds.
--
-- KEYS[1] the pin: a hash of place, number, claim (the key of its number), idle, seen, until, lost
-- ARGV    the instant ('' = Redis's own clock), owner, how long the request may be under way
-- Returns {place, number, idle, silent, lost}, or nothing where there is no such pin
--
-- Instants become text through text(): Lua's own way keeps 14 digits only. Numbers of sequences have up to 64 bits and
-- never become Lua's numbers at all.

local function text(number)
  return string.format('%.0f', number)
end

local now
if ARGV[1] == '' then
  local time = redis.call('TIME')
  now = tonumber(time[1]) * 1000000 + tonumber(time[2])
else
  now = tonumber(ARGV[1])
end

local pin = redis.call('HMGET', KEYS[1], 'place', 'number', 'claim', 'idle', 'seen', 'until', 'lost')
local kept_until = tonumber(pin[6] or '')
if not kept_until or kept_until <= now then
  return false
end

local new_until = math.max(kept_until, now + tonumber(ARGV[3]) + tonumber(pin[4]))
redis.call('HSET', KEYS[1], 'seen', text(now), 'until', text(new_until))
redis.call('PEXPIRE', KEYS[1], text(math.ceil((new_until - now) / 1000)))

local claim = redis.call('HMGET', pin[3], 'owner', 'until')
if claim[1] == ARGV[2] then
  local claim_until = math.max(tonumber(claim[2]), new_until)
  redis.call('HSET', pin[3], 'until', text(claim_until))
  redis.call('PEXPIRE', pin[3], text(math.ceil((claim_until - now) / 1000)))
end

return {pin[1], pin[2], pin[4], text(now - tonumber(pin[5])), pin[7]}
