-- The lease of a claim, from now: gateway/ports.py::Answers.renew.
--
-- KEYS[1] the claim: see claim_answer.lua
-- ARGV    its "<by> <fingerprint>", lease (ms)
-- Returns 1, or 0 where it is no longer the slot's

if redis.call('GET', KEYS[1]) ~= ARGV[1] then
  return 0
end
return redis.call('PEXPIRE', KEYS[1], ARGV[2])
