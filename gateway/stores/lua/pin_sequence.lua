-- Pins a new sequence to a place, under the first number that is its owner's already, or free:
-- gateway/core/sequences.py::Pins.pin; a random-history test proves the two equal. All times are whole microseconds.
--
-- KEYS[1]   the pin (see find_sequence.lua)
-- KEYS[2..] the numbers to try, best first: each a hash of owner, until
-- ARGV[1]   the instant ('' = Redis's own clock)
-- ARGV[2..] owner, place, idle time, how long the request may be under way
-- ARGV[6..] the numbers themselves, as text
-- Returns the number, or nothing where all are others'

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
local owner, place, idle = ARGV[2], ARGV[3], ARGV[4]
local pin_until = now + tonumber(ARGV[5]) + tonumber(idle)

local chosen
local claim_until = pin_until
for i = 2, #KEYS do
  local claim = redis.call('HMGET', KEYS[i], 'owner', 'until')
  local kept_until = tonumber(claim[2] or '')
  if not kept_until or kept_until <= now then
    chosen = chosen or i
  elseif claim[1] == owner then
    chosen = i
    claim_until = math.max(kept_until, pin_until)
    break
  end
end
if not chosen then
  return false
end

local number = ARGV[4 + chosen]
redis.call('HSET', KEYS[chosen], 'owner', owner, 'until', text(claim_until))
redis.call('PEXPIRE', KEYS[chosen], text(math.ceil((claim_until - now) / 1000)))
redis.call('HSET', KEYS[1], 'place', place, 'number', number, 'claim', KEYS[chosen], 'idle', idle,
  'seen', text(now), 'until', text(pin_until), 'lost', '0')
redis.call('PEXPIRE', KEYS[1], text(math.ceil((pin_until - now) / 1000)))
return number
