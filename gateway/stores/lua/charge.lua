-- Takes all charges of one admission, or none. The arithmetic is gateway/core/rate_limit.py::decide_all; a
-- random-history test proves the two equal. All times are whole microseconds.
--
-- KEYS[i]   the counter of charge i: its theoretical arrival time (tat)
-- ARGV[1]   '' = Redis's own clock, so that all gateways agree; tests give the instant here
-- ARGV[2..] three for each charge: emission interval, burst, cost
-- Returns five for each charge: allowed (0 or 1), tat, remaining, reset, retry after
--
-- Numbers are doubles, exact below 2^53 (now is near 2^51). Lua's own number-to-string keeps 14 digits only:
-- an instant becomes text through text() and never through '..' or tostring().

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

local tats = {}
local answer = {}
local all_allowed = true

for i, key in ipairs(KEYS) do
  local interval = tonumber(ARGV[3 * i - 1])
  local burst = tonumber(ARGV[3 * i])
  local cost = tonumber(ARGV[3 * i + 1])
  local window = interval * burst

  local tat = tats[key] or tonumber(redis.call('GET', key) or '') or now
  tat = math.min(math.max(now, tat), now + window)
  local new_tat = tat + interval * cost
  local wait = new_tat - window - now
  local allowed = wait <= 0
  local kept = allowed and new_tat or tat

  tats[key] = kept
  all_allowed = all_allowed and allowed
  answer[#answer + 1] = allowed and 1 or 0
  answer[#answer + 1] = kept
  answer[#answer + 1] = math.max(0, math.floor((now + window - kept) / interval))
  answer[#answer + 1] = kept - now
  answer[#answer + 1] = allowed and 0 or wait
end

if all_allowed then
  for key, tat in pairs(tats) do
    -- A counter whose tat has passed says the same as no counter: it lives exactly so long. At least 1 ms, for
    -- a charge of cost 0 may leave tat at now.
    redis.call('SET', key, text(tat), 'PX', text(math.max(1, math.ceil((tat - now) / 1000))))
  end
end

return answer
