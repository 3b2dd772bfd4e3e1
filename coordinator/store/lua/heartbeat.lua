-- ARGV: worker id, incarnation, alive_ms, queue_tokens, free_tokens, busy, then fields and values. 0 if not current.
local id = ARGV[1]
local node = key('node', id)
local known = redis.call('HMGET', node, 'incarnation', 'term', 'pending', 'reserved', 'capacity')
if known[1] ~= ARGV[2] or known[2] == '0' then return 0 end
-- What the worker holds beyond our credits: placed before Redis lost them, or grown longer than its credit.
local used_tokens = ARGV[6] == '1' and known[5] - ARGV[5] or 0
local beyond_pending = math.max(0, ARGV[4] - known[3])
local beyond_reserved = math.max(0, used_tokens - known[4])
redis.call('HSET', node, 'beyond_pending', beyond_pending, 'beyond_reserved', beyond_reserved, unpack(ARGV, 7))
redis.call('SET', key('node', id, 'alive'), ARGV[2], 'PX', ARGV[3])
return 1
